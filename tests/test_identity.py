"""Identity of runs: ids hang on resolved values under written names, and codes that give the same numbers are one."""

import gzip
import json
from dataclasses import dataclass, fields, replace
from inspect import isabstract
from math import nan
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from arithmetic import REPLAYED, same
from record_builders import evaluated, finished, publish, write_grid

from gcpo import paths
from gcpo.methods import METHODS, table
from gcpo.methods.components import Component
from gcpo.methods.response import EntropyFactor
from gcpo.reports import records, replay
from gcpo.runs import plan as plans
from gcpo.runs import record
from gcpo.runs.params import Params, validate
from gcpo.runs.plan import Plan
from gcpo.runs.record import RecordError

FILES = sorted(paths.REFERENCE.glob(f"*/{records.RUNS}"))
REFERENCE = [json.loads(line) for path in FILES for line in gzip.decompress(path.read_bytes()).splitlines()]
for manifest in REFERENCE:
    manifest["params"].pop("engine", None)  # of older records: "transformers", as all there is since


def ids() -> list[str]:
    return [Plan(manifest["kind"], validate(manifest["params"])).id for manifest in REFERENCE]


def test_every_run_of_the_reference_has_the_id_that_it_was_made_under() -> None:
    assert ids() == [manifest["id"] for manifest in REFERENCE] and len(REFERENCE) > 2000


def test_a_parameter_added_later_leaves_every_run_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    before = ids()[::40]

    class More(Params):
        patience: int = 3

    monkeypatch.setattr(plans, "validate", lambda values, source: More.model_validate(values))

    def made(**values: Any) -> list[str]:
        return [Plan(m["kind"], More.model_validate({**m["params"], **values})).id for m in REFERENCE[::40]]

    assert made(patience=4) == before  # a run of no kind reads it yet
    for kind in plans.KINDS:
        monkeypatch.setitem(plans.READ, kind, {*plans.READ[kind], "patience"})
    assert not set(made()) & set(before)  # without its line every id is another
    for kind in plans.KINDS:
        monkeypatch.setitem(plans.SINCE, f"{kind}.params.patience", 3)
    assert made() == before
    assert not set(made(patience=4)) & set(before)


def test_a_constant_added_later_leaves_every_run_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True, kw_only=True)
    class More(EntropyFactor):
        floor: float = 0.0

    egpo = METHODS["egpo"]
    plain = [factor for factor in egpo.factors if isinstance(factor, EntropyFactor)]
    more = tuple(More(**{field.name: getattr(one, field.name) for field in fields(one)}) for one in plain)
    before = Plan("train", validate({"method": "egpo"})).id
    monkeypatch.setitem(table.METHODS, "egpo", replace(egpo, factors=more))
    assert Plan("train", validate({"method": "egpo"})).id != before
    monkeypatch.setitem(plans.SINCE, "train.method.parts.EntropyFactor.floor", 0.0)
    assert Plan("train", validate({"method": "egpo"})).id == before


def test_what_a_class_is_called_is_no_part_of_an_id() -> None:
    before = ids()[::40]
    classes = {type(part) for method in METHODS.values() for part in method.components}
    names = {cls: cls.__name__ for cls in classes}
    try:
        for cls in classes:
            cls.__name__ = f"Renamed{cls.__name__}"
        assert ids()[::40] == before
    finally:
        for cls, name in names.items():
            cls.__name__ = name


def test_every_rule_has_a_kind_of_its_own() -> None:
    def below(cls: type) -> list[type]:
        return [one for sub in cls.__subclasses__() for one in (sub, *below(sub))]

    ours = [cls for cls in below(Component) if cls.__module__.startswith("gcpo.") and not isabstract(cls)]
    kinds = [vars(cls)["kind"] for cls in ours]
    assert len(set(kinds)) == len(kinds) >= 15


# --- codes that give the same numbers ---------------------------------------------------------------------------------


def made_by(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = {"code": code, "commit": "beef" * 10, "dirty": False, "hardware": {"threads": 1}}
    monkeypatch.setattr(record, "environment", lambda: made)


def with_a_gap(score: float) -> dict[str, pd.DataFrame]:
    """A table that has a column without a value, of which a reference says nothing."""
    return {"eval": evaluated(score)["eval"].assign(unknown=nan)}


def made_again(monkeypatch: pytest.MonkeyPatch, score: float) -> None:
    """Let replays write their record without training."""

    def run_grid(listed: list[Plan], jobs: int | None = None) -> list[Any]:
        for plan in listed:
            finished(profile=plan.params.profile, seed=plan.params.seed, tables=with_a_gap(score))
        return []

    monkeypatch.setattr("gcpo.reports.replay.run_grid", run_grid)


@pytest.mark.parametrize("score", [0.5, 0.25])
def test_a_code_is_certified_by_replays(score: float, places: Path, monkeypatch: pytest.MonkeyPatch, call: Any) -> None:
    write_grid("g", [{"kind": "train", "seed": [0, 1]}])
    made_by("c0de", monkeypatch)
    finished(seed=0, tables=with_a_gap(0.5))
    publish()
    made_by("0ther", monkeypatch)
    finished(seed=1, tables=with_a_gap(0.5))
    with pytest.raises(RecordError, match=r"different code.*gcpo replay"):
        records.find("p", "g")
    made_again(monkeypatch, score)
    said = call("replay", "1", "--profile", "p", status=0 if score == 0.5 else 2).out
    if score == 0.5:
        assert "the same tables" in said
        assert record.same_numbers("p") == {"c0de", "0ther"}
        assert len(records.find("p", "g")) == 2
    else:
        assert "eval.csv" in said and "5e-01" in said
        assert not record.same_numbers("p")


def test_an_id_that_has_become_another_is_named(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finished(seed=0)
    publish()
    monkeypatch.setattr(plans, "SCHEMA", plans.SCHEMA + 1)
    runs = records.runs("p", reference=True)
    with pytest.raises(RecordError, match=r"has become .*SINCE"):
        replay.replay("p", runs)


def test_the_nine_are_made_again_first_and_then_every_kind_and_method_before_any_comes_twice() -> None:
    runs = replay.chosen("laptop", 35)
    assert {run.manifest["id"] for run in runs[:9]} == set(replay.NINE)
    kinds = [run.manifest["kind"] for run in runs[9:]]
    assert sorted(kinds[:3]) == ["evaluate", "gradients", "one_step"] and set(kinds[3:]) == {"train"}
    assert len({run.manifest["params"]["method"] for run in runs[12:]}) == 23


@pytest.mark.replay
@pytest.mark.slow
@pytest.mark.parametrize("id_", replay.NINE)
def test_a_run_of_the_reference_made_again_has_the_same_tables(id_: str, outputs: Path) -> None:
    if not same(REPLAYED):
        pytest.skip("this machine's arithmetic, or its embedded models, are not those of the reference")
    run = next(run for run in records.runs("laptop", reference=True) if run.manifest["id"] == id_)
    assert replay.replay("laptop", [run], jobs=1) == {id_: ""}
