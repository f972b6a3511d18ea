"""Files: replaced in one step, and known by their content."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from gcpo import paths

SUMS = "SHA256SUMS"  # as the command of that name writes and checks it

_known: dict[str, list[object]] = {}  # path -> what its file looked like, and its SHA-256
_read: Path | None = None  # where they were read from


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A draft beside a file or folder, which takes its place at the end: a kill leaves the old one or the new one.

    A draft that a kill left behind is removed first; an error removes it too. For what one process writes at a time.
    """
    draft = path.with_name(f".{path.name}.draft")
    _remove(draft)
    draft.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield draft
        if draft.is_dir():
            old = path.with_name(f".{path.name}.old")
            _remove(old)
            if path.exists():
                path.rename(old)
            draft.rename(path)
            _remove(old)
        else:
            draft.replace(path)
    finally:
        _remove(draft)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def write(path: Path, text: str) -> None:
    """Replace a text file in one step."""
    with replacing(path) as draft:
        draft.write_text(text, encoding="utf-8")


def check_writable(folder: Path) -> None:
    """Raise the ``OSError`` that writing into a folder, which is made if need be, would raise."""
    folder.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=folder).close()  # of a name of its own: other commands may look at the same time


def sha256(path: Path) -> str:
    """SHA-256 of a file, remembered in ``outputs/hashes.json`` while its size and times stay as they were."""
    _recall()
    status = path.stat()
    looks = [status.st_size, status.st_mtime_ns, status.st_ctime_ns]  # who sets the second back changes the third
    name = str(path.absolute())
    if _known.get(name, [])[:3] != looks:
        with path.open("rb") as file:
            _known[name] = [*looks, hashlib.file_digest(file, "sha256").hexdigest(), "new"]
    return str(_known[name][3])


def hashes(place: Path) -> dict[str, str]:
    """SHA-256 of a file, or of every file below a folder (hidden ones left out), by name."""
    if place.is_file():
        return {place.name: sha256(place)}
    names = (path.relative_to(place) for path in sorted(place.rglob("*")) if path.is_file())
    return {
        name.as_posix(): sha256(place / name)
        for name in names
        if name.name != SUMS and not any(part.startswith(".") for part in name.parts)
    }


def remember() -> None:
    """Keep the SHA-256 of the files seen for the next process; they are computed again where none can be kept."""
    if any(len(entry) > 4 for entry in _known.values()):
        kept = {name: entry[:4] for name, entry in _known.items() if os.path.exists(name)}  # noqa: PTH110, half the time
        with contextlib.suppress(OSError):
            write(paths.OUTPUTS / "hashes.json", json.dumps(kept))
        _known.clear()
        _known.update(kept)


def _recall() -> None:
    global _read
    path = paths.OUTPUTS / "hashes.json"
    if _read != path:
        _known.clear()
        _read = path
        with contextlib.suppress(OSError, ValueError, AttributeError, TypeError):
            _known.update({str(k): v for k, v in json.loads(path.read_text()).items() if len(v) == 4})


def seal(folder: Path) -> None:
    """Write ``SHA256SUMS`` of all files of a folder: the last file of a folder that is complete."""
    write(folder / SUMS, "".join(f"{value}  {name}\n" for name, value in hashes(folder).items()))


def broken(folder: Path) -> str | None:
    """What is wrong with a sealed folder, or None: not complete, or a file missing or changed since."""
    try:
        lines = (folder / SUMS).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return f"{folder} is not complete (no {SUMS})"
    for line in lines:
        expected, _, name = line.partition("  ")
        path = folder / name
        if not path.is_file():
            return f"{path} is missing"
        if sha256(path) != expected:
            return f"{path} is not what was written"
    return None
