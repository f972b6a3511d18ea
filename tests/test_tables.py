"""Tables: intervals and differences by hand, files that can be read again, and the README between its markers."""

import csv
import math
from pathlib import Path

import pandas as pd

from gcpo.methods import METHODS
from gcpo.reports import methods, tables
from gcpo.reports.tables import NAMES, display_name
from gcpo.runs.params import validate
from gcpo.runs.profiles import load_profile

# --- files ----------------------------------------------------------------------------------------------------------

TABLE = pd.DataFrame({"method": ["grpo", "cd_only"], "share in %": [12.5, math.nan], "each": [[1, 2], None]})


def test_a_table_is_written_as_csv_with_its_source_where_there_is_one(tmp_path: Path) -> None:
    source = "reference of profile p"
    tables.write_table(TABLE, tmp_path / "new", "t", source)
    tables.write_table(TABLE, tmp_path / "new", "of_no_runs", None)
    tables.write_table(TABLE, None, "nowhere", source)
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["of_no_runs.csv", "t.csv"]
    head, *rows = csv.reader((tmp_path / "new" / "t.csv").read_text().splitlines())
    assert head == ["method", "share in %", "each", "records"]
    assert rows == [["grpo", "12.5", "[1, 2]", source], ["cd_only", "", "", source]]


def test_markdown_shows_cells_as_they_are() -> None:
    forged = pd.DataFrame({"a <b>": ["mean |A|", "<img src=x>\n| & &lt;", "A > 0, `x`, [n](n.md)"]})
    head, _, *rest = methods.markdown(forged).splitlines()
    assert head == "| a &lt;b> |"
    assert rest == [r"| mean \|A\| |", r"| &lt;img src=x> \| &amp; &amp;lt; |", "| A > 0, `x`, [n](n.md) |"]


def test_what_departs_from_a_profile_is_shown_and_nothing_else() -> None:
    values = load_profile("laptop")
    usual = validate({**values, "task": "tinymath"})
    assert tables.departures(usual).empty
    changed = tables.departures(validate({**values, "task": "tinymath", "alpha": 0.3, "max_completion_length": 16}))
    assert changed.to_dict("index") == {
        "alpha": {"the profile has": "None", "this run has": "0.3"},
        "max_completion_length": {"the profile has": "40", "this run has": "16"},
    }


def test_people_read_names_and_not_identifiers() -> None:
    said = {"seed_grpo 16": "SEED-GRPO (16)", "gcpo_bot, 0.3M minus grpo": "GCPO-BoT, 0.3M minus GRPO", "none": "none"}
    assert {label: display_name(label) for label in said} == said
    assert set(NAMES["methods"]) <= set(METHODS) and len({display_name(name) for name in METHODS}) == len(METHODS)
