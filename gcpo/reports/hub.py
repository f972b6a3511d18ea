"""The committed reference as a data set: records, tables, figures and world, with a card that says what each is."""

from __future__ import annotations

import importlib.metadata
import shutil
import tempfile
from pathlib import Path

from gcpo import io, paths
from gcpo.reports import records
from gcpo.runs.fields import refuse_secrets
from gcpo.runs.params import profile_name
from gcpo.runs.record import RecordError

HUB = "hub:"  # before the name of a data set of the Hub
HOLDS = {
    "eval.parquet": "scores of each held-out question at the end of each training run",
    "validation.parquet": "scores of each validation question at 0, 25, 50, 75 and 100 % of the steps",
    "metrics.parquet": "a line per training step: reward, loss, every measure and weight",
    "queries.parquet": "gradient variance V(q) and every measure of a question's answers",
    "pairs.parquet": "distances of pairs of answers, of their embeddings and of their gradients",
    "answers.parquet": "sampled answers of policies that were evaluated, with entropies and scores",
    "runs.jsonl": "a manifest per run: parameters, commit, versions, hashes of models and data, hardware, time",
    "world/": "the embedded policy and entailment model that all runs start from, in Hub format",
    "SHA256SUMS": "of all of these",
    "codes.yaml": "versions of the code that give the same numbers",
    "*.csv, *.png": "tables and figures that the report notebooks made of the records",
}
CARD = Path(__file__).with_name("card.md")


def card(profile: str, folder: Path) -> str:
    """Return the card of a reference's data set, which names the files that the folder has."""
    there = {name: said for name, said in HOLDS.items() if any(folder.glob(name.split(",")[0].rstrip("/")))}
    tables = [name.removesuffix(".parquet") for name in there if name.endswith(".parquet")]
    return CARD.read_text(encoding="utf-8").format(
        profile=profile,
        count=len((folder / "runs.jsonl").read_bytes().splitlines()),
        version=importlib.metadata.version("gcpo"),
        configs="\n".join(f"- config_name: {name}\n  data_files: {name}.parquet" for name in tables),
        holds="\n".join(f"| `{name}` | {said} |" for name, said in there.items()),
    )


def push_records(profile: str, to: str) -> str:
    """Write the reference of a profile with its card into a new folder, or into a data set of the Hub (``hub:NAME``).

    Returns:
        where it is.

    Raises:
        RecordError: no whole reference of this profile is committed, or the folder is there already.
    """
    name = profile_name(profile)
    kept = paths.REFERENCE / name
    if not (found := records.runs(name, reference=True)):
        raise RecordError(f"{kept}: no reference of {name} is committed.")
    for run in found:
        refuse_secrets(run.manifest, f"{kept}: the record of {run.manifest['id']}: ")
    if why := io.broken(kept):
        raise RecordError(f"{why}: restore it from the repository, or publish again.")
    if not to.startswith(HUB):
        if Path(to).exists():
            raise RecordError(f"{to} is there already: name a new folder.")
        with io.replacing(Path(to).resolve()) as draft:
            _write(name, kept, draft)
        return to
    from huggingface_hub import HfApi

    with tempfile.TemporaryDirectory() as place:
        _write(name, kept, Path(place) / name)
        repository = HfApi().create_repo(to.removeprefix(HUB), repo_type="dataset", exist_ok=True)
        HfApi().upload_folder(repo_id=repository.repo_id, repo_type="dataset", folder_path=Path(place) / name)
    return str(repository)


def _write(profile: str, kept: Path, folder: Path) -> None:
    shutil.copytree(kept, folder)
    (folder / "README.md").write_text(card(profile, kept), encoding="utf-8")
    if (paths.ROOT / "CITATION.cff").exists():
        shutil.copy(paths.ROOT / "CITATION.cff", folder)
