"""Metadata of a release that depend on where the project is public: its addresses, and a README whose links lead there.

The address is GCPO_REPOSITORY, as for the site, or ``repository-code`` of CITATION.cff; without either, links stay as
they are. The version, in pyproject.toml and nowhere else, names the tag that the links lead to.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(!?)(\[[^\]]*\])\((?!\w+:|#)([^)]+)\)")  # relative ones; an exclamation mark begins a picture


def absolute(text: str, repository: str, tag: str) -> str:
    """Return Markdown whose links and pictures are found from anywhere."""
    return LINK.sub(
        lambda found: "{}{}({}/{}/{}/{})".format(
            found[1], found[2], repository, "raw" if found[1] else "blob", tag, found[3]
        ),
        text,
    )


class Public(MetadataHookInterface):
    """Give hatchling the fields that pyproject.toml calls dynamic."""

    def update(self, metadata: dict[str, Any]) -> None:
        root = Path(self.root)
        text = (root / "README.md").read_text(encoding="utf-8")
        named = re.search(r"^repository-code: *(\S+)", (root / "CITATION.cff").read_text(encoding="utf-8"), re.M)
        repository = (os.environ.get("GCPO_REPOSITORY") or (named[1] if named else "")).strip("\"'/")
        if repository:
            tag = f"v{metadata['version']}"
            text = absolute(text, repository, tag)
            metadata["urls"] = {
                "Source": repository,
                "Changelog": f"{repository}/blob/{tag}/CHANGELOG.md",
                "Issues": f"{repository}/issues",
            }
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
