"""Models and data sets that runs read, for a machine that has no network: which, how large, and how to bring them::

python workflow/downloads.py --profile paper                      # those of its grids, and the commands
python workflow/downloads.py paper_figure1 --profile paper --fetch DIR  # the data's files, for GCPO_DATA_DIR there
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from gcpo import io
from gcpo.errors import UserError
from gcpo.runs.estimates import GB, KNOWN, policy
from gcpo.runs.grids import expand, fitting
from gcpo.runs.params import validate
from gcpo.runs.plan import UNREAD, Plan, with_trainings
from gcpo.runs.preflight import asked_splits
from gcpo.runs.profiles import load_profile
from gcpo.semantics.loading import MINILM
from gcpo.tasks import sources
from gcpo.tasks.reading import Source, hub_records

WEIGHTS = "config.json, generation_config.json, *.safetensors, tokenizer*"


class Download(NamedTuple):
    """One model, or one file of a data set: its name on the Hub, revision, files, GB (None: not known) and where a run
    looks for it."""

    kind: str
    name: str
    revision: str
    files: str
    size: float | None
    place: str

    def __str__(self) -> str:
        size = "size not known" if self.size is None else f"about {1000 * self.size:.0f} MB"
        if self.size and self.size >= 1:
            size = f"about {self.size:.1f} GB"
        return f"{self.kind} {self.name} @ {self.revision}: {self.files} ({size}) -> {self.place}"


def needed(plans: Sequence[Plan]) -> list[Download]:
    """Return what runs, and the trainings whose policies they look at, download: models first, each once."""
    every = with_trainings(plans)
    found: dict[Download, Download] = {}
    for one in (
        *(model for plan in every for model in _models(plan)),
        *(file for plan in every for file in _files(plan)),
    ):
        bare = one._replace(size=None)  # splits may share a file, whose size one of them tells
        found[bare] = max(one, found.get(bare, one), key=lambda same: same.size or 0)
    return list(found.values())


def _models(plan: Plan) -> Iterator[Download]:
    params, cache = plan.params, "the Hub's cache (HF_HOME)"
    trains = plan.kind == "train"
    reads = {"policy": True, "embedder": not trains or "embeddings" in plan.method.reads}
    reads["entailment"] = not trains or plan.method.needs_entailment(plan.task.full_completion)
    for kind, read in reads.items():
        name = getattr(params, kind)
        if not read or kind in (plan.embedded.keys() | UNREAD[plan.kind]) or Path(name).exists():
            continue
        name, files = (MINILM[1], "all") if name in MINILM else (name, f"{WEIGHTS}, vocab.json, merges.txt")
        # The Hub has the papers' policies in bfloat16.
        size = 2 * policy(name)[1] / GB if name in KNOWN.policies else KNOWN.downloads.get(name)
        revision = params.policy_revision if kind == "policy" else None
        yield Download("model", name, revision or "main", files, size, cache)


def _sources(plan: Plan) -> Iterator[tuple[str, Source]]:
    """Yield the split and the source of every file that a run reads; none of a generated task."""
    known = sources(plan.params.task)
    for split in asked_splits(plan):
        if found := known.get(split):
            yield from ((split, source) for source in (found, *found.more))


def _files(plan: Plan) -> Iterator[Download]:
    params = plan.params
    known, own = KNOWN.benchmarks.get(params.task, KNOWN.others), sources(params.task)
    for split, source in _sources(plan):
        whole = split == "whole" or list(own.values()).count(own[split]) == 1  # not a part of a file that splits share
        size = known[split] * known["prompt"] / GB if whole and split in known else None
        files = f"{source.config or 'default'}, {source.split}"
        if source.columns:
            files += f" (columns {', '.join(source.columns)})"
        revision = params.data_revision or source.revision or "main"
        place = f"$GCPO_DATA_DIR/{source.file('').as_posix()}"
        yield Download("data", source.dataset, revision, files, size, place)


def commands(downloads: Sequence[Download], asked: str) -> list[str]:
    """Return the commands that bring downloads, on a machine with a network; ``asked`` is what lists them."""
    models = {(one.name, one.revision) for one in downloads if one.kind == "model"}
    named = [f"hf download {name}" + f" --revision {at}" * (at != "main") for name, at in sorted(models)]
    data = [f"python workflow/downloads.py {asked} --fetch DIR"] if any(one.kind == "data" for one in downloads) else []
    there = "there: HF_HUB_OFFLINE=1, HF_HOME with these models" + " and GCPO_DATA_DIR=DIR" * bool(data)
    return [*named, *data, there] if named or data else []


def fetch(plans: Sequence[Plan], folder: Path) -> Iterator[Path]:
    """Write the data of runs into the files that are read from a folder (``$GCPO_DATA_DIR``), and yield each; what is
    there is left as it is.

    Raises:
        OSError: the Hub cannot be read, or the folder not be written.
    """
    wanted = {
        source.file(folder): (source, plan.params.data_revision)
        for plan in with_trainings(plans)
        for _, source in _sources(plan)
    }
    for path, (source, revision) in wanted.items():
        if not path.exists():
            with io.replacing(path) as draft, draft.open("w", encoding="utf-8") as file:
                for _, record in hub_records(source, revision):
                    file.write(json.dumps(record, ensure_ascii=False, default=str) + "\n")
        yield path


def main(arguments: Sequence[str] | None = None) -> int:
    """List what runs download, or write their data into a folder; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("grids", nargs="*", help="[those that fit the profile]")
    parser.add_argument("--profile", required=True)
    parser.add_argument("--fetch", metavar="DIR", type=Path, help="write the data's files there")
    given = parser.parse_args(arguments)
    try:
        own = Plan("train", validate(load_profile(given.profile), given.profile))
        plans = [own, *(plan for grid in given.grids or fitting(given.profile) for plan in expand(grid, given.profile))]
        if given.fetch:
            print(*fetch(plans, given.fetch), sep="\n")
            return 0
    except (UserError, OSError) as error:
        print(f"downloads: {error}", file=sys.stderr)
        return 2
    found = needed(plans)
    known = sum(one.size or 0 for one in found)
    print(*found, sep="\n", end="\n" * bool(found))
    print(f"{len(found)} downloads of {given.profile}, {known:.1f} GB as far as sizes are known")
    print(*commands(found, " ".join([*given.grids, "--profile", given.profile])), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
