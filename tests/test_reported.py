"""The papers' tables as data: their form, cells copied from the papers once more, and the papers' own arithmetic."""

from __future__ import annotations

import hashlib
import itertools
import os
import re
from decimal import Decimal
from pathlib import Path

import pandas as pd
import pytest

import gcpo
from gcpo.methods import METHODS
from gcpo.reports import tables

FOLDER = Path(gcpo.__file__).with_name("reported")
IDENTIFYING = ["method", "label", "model", "task", "metric", "measure", "setting"]
PRINTED = ["value", "spread", "unit", "spread_kind", "copied_from"]
UNITS = set("percent points correlation covariance ratio count thousands tokens reward none".split())
UNITS |= {"relative percent", "upper bound", "lower bound"}  # the bounds are those of p values: "<0.001", ">0.05"
BENCHMARKS = set("narrativeqa qasper hotpotqa math math500 aime24 amc amc23 minerva olympiadbench gsm8k".split())
BENCHMARKS |= {"mmlu_stem", "average", ""}
BASE7, R1 = "Qwen2.5-Math-7B", "DeepSeek-R1-Distill-Qwen-7B"

# A changed number changes its file's checksum: look it up in the paper again before you change the checksum too.
SHA256 = {
    "gcpo_table1": "47e07137d5c6537ee5e5dfd42c5f32d9ba08a30249515f6a8ceb52ba5032013d",
    "gcpo_table2": "1bca3529327c48e8ad357ac05c6d1d7f885380d6f67883f5a30feda47ab307a4",
    "gcpo_table3": "f3d79717bfa8aeb7a64eef2d98cfeff9a6110be85d76676b25574f84792c5be4",
    "gcpo_table4": "99301ddf4618430c902017ffd985479911123dda11b1512862f726015c67ad77",
    "gcpo_table5": "5c54f495ca9eae54565b267192db9c4faf8d07ea3045936f54a521aab5afc486",
    "gcpo_table6": "6cf71c5889622030c0a93ece9f95bb877ad4b642dcc5c6815fa39c2af4a436bc",
    "seed_grpo_table1": "2631253ca0dedf44f8453686756aac6cb9b194a76d824c52b26296b0314c0d6b",
    "seed_grpo_table2": "9ba2c7cc1d2b6c27d60c8beaeb80dcf9fa2d6d199cd8ee342b3bf19755286d7e",
    "seed_grpo_table3": "1a903adf293614edd7e2070583243f8f4253ca2b2ea7058ef2548195c7bb3054",
    "seed_grpo_table4a": "2c66476aac6f8317eb7dffe57466c83019859a9bd8325af6aa917d7077aff372",
    "seed_grpo_table4b": "e073122a260a4b50a0cf218270459a28843331ef172d7ff32c33ae0a37b230fb",
    "seed_grpo_table4c": "6c637e85b807b62c624b181ef8c892a6ebd98a30002676b9b47e13478e5f7952",
    "seed_grpo_table4d": "db14f47a86ac2155c8bdf917d9268c77a76a55d2232b88521c5384b843f43eda",
    "seed_grpo_table4e": "da9bda1669acf17756c00469f4536b0391032ef2f1809c78a993067b5219dbc0",
    "egpo_table1": "e061bf02eadd100d2b821103dc16b99963785b4445f588a00df7c7ce7c03609b",
    "egpo_table2": "e9bdf1e16b1e289fc7f90a76543e0f217afd532a0ca4a445a10f0cf31f9ce9f4",
    "egpo_table3": "73d08d721c04139451bd1e692fb3d93c58dc577e548fc3d4c4978309120e165c",
    "egpo_appendix_a2": "2ff7a11f8785ff78c5d503e1b51706a9aa2ac50af07eb75d58da6400d45b1285",
    "cw_grpo_table1": "78f4968fdb1b350c895930a48606ac93e59cc94f36f12b6d25d75489f95b257f",
    "cw_grpo_table2": "3f92ce24d716c9d2ef1927f0959c8cb08711b08eae34d573296e0bad0610c6d3",
    "cw_grpo_table3": "45aa73623152e2e9e494e3617e9d7cd396e647c70b3c86fb2ff2742b77b453aa",
    "cw_grpo_table4": "66698820c14a0808c75ebebf0aef6c267e1d352c40aece507b62104d8d386160",
    "cw_grpo_table5": "cd46e7123b41934956dfb52a9a4076093c1e206e2aaf81bea33dde342c69255e",
}

# Read in the papers' texts, not in the files: words that identify a number, and the number as printed there.
SPOTS = {
    "gcpo_table1": {
        "w/t KLE|qasper|bleu": "11.62±0.35",
        "empo|qasper|f1": "18.05±0.23",
        "CARE|hotpotqa|em": "43.75±2.14",
        "gcpo_bot|qasper|bleu": "10.94±1.49",
        "gcpo_cd|hotpotqa|em_gain": "26.28",
        "Δ vs. GRPO|gcpo_bot|narrativeqa|f1_gain": "10.15",
    },
    "gcpo_table2": {
        "kle|olympiadbench": "33.33±2.52",
        "GRPO-Care|aime24": "14.43±1.96",
        "empo|aime24": "13.3",
        "gcpo_cd|aime24": "17.80±1.56",
        "Qwen2.5-Math-1.5B|olympiadbench": "28.4",
    },
    "gcpo_table3": {
        "math|bot|spearman": "-0.728",
        "olympiadbench|cd|spearman": "-0.467",
        "olympiadbench|token_entropy|spearman": "-0.424",
        "olympiadbench|bot|p": "0.001",
    },
    "gcpo_table4": {
        "math|bot|spearman": "0.610",
        "olympiadbench|token_entropy|spearman": "-0.066",
        "olympiadbench|se|spearman": "0.165",
        "olympiadbench|token_entropy|p": "0.05",
    },
    "gcpo_table5": {
        "hotpotqa|factor": "2.0",
        "AIME24|else": "0",
        "math|if right": "2.0",
        "olympiadbench|range high": "2",
    },
    "gcpo_table6": {
        "r2vpo|qasper|bleu": "9.67±0.72",
        "egspo|qasper|accuracy": "14.29±1.22",
        "Q-Hawkeye (2026)|narrativeqa|f1": "71.63±0.26",
        "gcpo_bot|qasper|f1": "24.37±0.64",
    },
    "seed_grpo_table1": {"amc": "83", "minerva": "272", "OlympiadBench": "675", "split=train": "8.5"},
    "seed_grpo_table2": {
        "RAFT++ 7B|minerva": "35.8",
        "QwQ-preview 32B|math500": "90.6",
        "dapo|avg@32": "50.0",
        "GPG 7B|average": "51.0",
        "f=linear alpha=0.02 report=mean runs=3|amc": "64.67±4.9",
        f"{R1}|olympiadbench": "61.5",
        "seed_grpo|Qwen2.5-Math-1.5B|minerva": "26.8",
    },
    "seed_grpo_table3": {
        "G=8 steps=384|aime24": "40.0",
        "G=8 steps=928|math500": "83.0",
        "SimpleRL-Zoo 7B|prompt_batch_size": "1024",
        "dapo|steps": "5.5",
        "dapo|train_data": "17",
    },
    "seed_grpo_table4a": {
        "dr_grpo|minerva": "30.1",
        "Baseline 7B|aime24": "0.2",
        "seed_grpo|amc": "69.9",
        "Dr.GRPO 7B|math500": "80.0",
    },
    "seed_grpo_table4b": {
        "alpha=0.03|olympiadbench": "44.4",
        "alpha=0.01|amc": "60.2",
        "alpha=0.03|aime24": "50.0",
        "alpha=0.01|average": "52.7",
    },
    "seed_grpo_table4c": {
        "f=exponential|minerva": "35.7",
        "f=focal|math500": "84.4",
        "Focal|olympiadbench": "47.6",
        "f=exponential|average": "54.3",
    },
    "seed_grpo_table4d": {
        "G=10|average": "56.2",
        "G=10|amc": "61.4",
        "G=16|minerva": "34.2",
        "G=10|olympiadbench": "48.1",
    },
    "seed_grpo_table4e": {
        f"Base|{R1}|amc": "26.2",
        "dr_grpo|Qwen2.5-Math-1.5B|amc": "53.0",
        f"seed_grpo|{R1}|minerva": "38.6",
        f"seed_grpo|{BASE7}|aime24": "56.7",
    },
    "egpo_table1": {
        "DeepSeek-R1-1.5B + DAPO|aime24|accuracy_gain": "-3.34",
        f"dapo|{BASE7}|gsm8k|accuracy": "86.43",
        f"grpo|{R1}|aime24|accuracy": "54.58",
        f"egpo|{R1}|mmlu_stem|accuracy_gain": "6.83",
        "DeepSeek-R1-7B (Base)|mmlu_stem": "85.15",
        f"edge_grpo|{BASE7}|minerva|accuracy": "41.18",
    },
    "egpo_table2": {
        "egpo_c5|math500": "81.05",
        "egpo_c2|minerva": "30.51",
        "C6 (renorm clamp)|average": "62.15",
        "egpo_c4|gsm8k": "79.68",
        "Base|average": "33.82",
    },
    "egpo_table3": {
        "DeepSeek-R1-Distill-Qwen-1.5B|thinking_entropy": "0.745",
        "DeepSeek-R1-Distill-Qwen-1.5B|answer_entropy": "0.778",
        f"{R1}|thinking_entropy": "0.700",
        f"{R1}|answer_entropy": "0.738",
    },
    "egpo_appendix_a2": {"extended": "0.15", "mixed": "0.60", "threshold": "0.8", "longest prompt": "1024"},
    "cw_grpo_table1": {
        "negative|percentile=0.01": "-13.62",
        "positive|percentile=1.00": "3.32",
        "40.00%|negative": "-0.22",
        "100.00%|positive": "0.06",
    },
    "cw_grpo_table2": {
        "Open-RS1|fine_tuning_samples": "18615",
        "rStar-Math-7B|amc23": "47.5",
        "Eurus-2-7B-PRIME|minerva": "38.6",
        "clip_cov|Qwen2.5-Math-7B-Instruct|olympiadbench|correct": "279",
        "cw_grpo|Qwen2.5-Math-7B-Instruct|minerva|accuracy": "32.0",
        "DeepScaleR-1.5B-Preview|amc23": "73.6",
        "cw_grpo|DeepSeek-R1-Distill-Qwen-1.5B|average|accuracy_gain": "6.4",
    },
    "cw_grpo_table3": {
        "cw_grpo|steps=150|olympiadbench": "53.9",
        "grpo|200 (entropy high)|math500": "79.8",
        "cw_grpo|steps=200|math500": "86.4",
        "grpo|steps=200|olympiadbench": "47.8",
    },
    "cw_grpo_table4": {"amc23": "40", "minerva": "272", "olympiadbench": "675", "math500": "500"},
    "cw_grpo_table5": {
        "Learning Rate": "1.0e-6",
        "max_completion_length": "4096",
        "rollouts": "12",
        "temperature": "0.7",
    },
}


def read(name: str) -> pd.DataFrame:
    """A file as it is, every cell a string."""
    return pd.read_csv(FOLDER / f"{name}.csv", dtype=str, keep_default_na=False)


def identifying(table: pd.DataFrame) -> list[str]:
    return [column for column in IDENTIFYING if column in table]


def select(address: str) -> pd.DataFrame:
    """The rows of "table: word|word" that have each word in one of their identifying columns."""
    name, _, words = address.partition(": ")
    table = read(name)
    for word in words.split("|"):
        table = table[(table[identifying(table)] == word).any(axis=1)]
    return table


def cell(address: str) -> Decimal:
    (value,) = select(address)["value"]
    return Decimal(value)


def numbers(address: str) -> dict[tuple[str, str], tuple[Decimal, str]]:
    """Value and spread of each result of these rows, by task and metric."""
    rows = select(address)
    rows = rows[(rows["task"] != "") & ~rows["metric"].str.endswith("_gain")]
    return {(r.task, r.metric): (Decimal(r.value), r.spread) for r in rows.itertuples()}


# --- the files ------------------------------------------------------------------------------------------------------


def test_every_table_has_its_checksum_and_its_spots() -> None:
    files = sorted(FOLDER.iterdir())
    assert {path.stem: hashlib.sha256(path.read_bytes()).hexdigest() for path in files} == SHA256
    assert set(SPOTS) == set(SHA256)


@pytest.mark.parametrize("name", SHA256)
def test_the_form_of_a_table(name: str) -> None:
    table = read(name)
    columns = identifying(table)
    assert list(table) == columns + PRINTED
    assert len(table) > 1 and not table.duplicated(columns).any()
    assert table["value"].map(Decimal).map(Decimal.is_finite).all()  # Decimal takes neither "1,000" nor "60 %"
    assert table.loc[table["spread"] != "", "spread"].map(Decimal).gt(0).all()
    assert not table.loc[table["spread"] == "", "spread_kind"].any()
    assert set(table["unit"]) <= UNITS
    assert set(table.get("task", ())) <= BENCHMARKS
    assert set(table.get("method", ())) <= {*METHODS, ""}
    assert table.get("setting", pd.Series(dtype=str)).str.fullmatch(r"(\S+=\S+( \S+=\S+)*)?").all()


@pytest.mark.parametrize("name", SPOTS)
def test_cells_are_as_the_paper_prints_them(name: str) -> None:
    assert len(SPOTS[name]) >= 4
    for words, printed in SPOTS[name].items():
        found = select(f"{name}: {words}")
        assert (found["value"] + ("±" + found["spread"]).where(found["spread"] != "", "")).tolist() == [printed], words


def test_numbers_that_a_public_leaderboard_repeats() -> None:
    assert cell("gcpo_table2: gcpo_cd|math500") == Decimal("74.67")
    assert cell("gcpo_table2: gcpo_cd|aime24") == Decimal("17.8")
    assert cell("gcpo_table2: gcpo_cd|olympiadbench") == Decimal("38.24")
    assert cell("gcpo_table1: gcpo_bot|narrativeqa|accuracy") == Decimal("73.77")
    assert cell("gcpo_table1: gcpo_bot|qasper|accuracy") == Decimal("13.91")
    assert cell("gcpo_table1: gcpo_bot|hotpotqa|f1") == Decimal("60.78")


@pytest.mark.skipif(
    "GCPO_PAPERS_DIR" not in os.environ, reason="needs GCPO_PAPERS_DIR, a folder with the papers' texts"
)
@pytest.mark.parametrize("name", sorted(set(SHA256) - {"gcpo_table5", "egpo_appendix_a2"}))  # their cells are sentences
def test_every_row_stands_in_the_papers_text(name: str) -> None:
    """Letters and digits alone are compared: what parts the columns, and a minus, differs from text to text."""
    paper = name.rpartition("_")[0].replace("_", "-")
    text = (Path(os.environ["GCPO_PAPERS_DIR"]) / f"{paper}.txt").read_text()
    text = re.sub(r"\[([^\]]*)\]\(http[^)]*\)", r"\1", text)  # links
    text = re.sub(r"\\([^a-zA-Z])", r"\1", text.replace(r"\alpha", "α"))
    text = re.sub(r"</?\w+>|\\[a-zA-Z]+|\([A-Z][^()]*\d{4}[a-z]?\)|\(Avg@32\)", "", text)  # tags, commands, citations
    text = re.sub(r"[^\w.]", "", text)
    table = read(name)
    table = table[~table["value"].str.contains("e")].copy()  # a power of ten is written in LaTeX
    table["cell"] = table["value"].str.lstrip("-") + table["unit"].map({"thousands": "k"}).fillna("") + table["spread"]
    row = [column for column in ("method", "label", "model", "setting") if column in table]
    for key, cells in itertools.groupby(table.to_dict("records"), key=lambda line: [line[column] for column in row]):
        line = list(cells)
        printed = [re.sub(r"[^\w.]", "", part) for part in (line[0]["label"], "".join(c["cell"] for c in line))]
        assert re.search(r"\D*".join(map(re.escape, printed)), text), key


# --- reading them ---------------------------------------------------------------------------------------------------


def test_a_table_is_read_with_numbers_and_empty_words() -> None:
    table = tables.reported("gcpo_table2")
    assert all(tables.reported(name)[column].dtype == float for name in SHA256 for column in ("value", "spread"))
    first = table.iloc[0]
    assert (first["method"], first["value"], first["copied_from"]) == ("", 61.8, "SEED-GRPO paper, Table 2")
    assert pd.isna(first["spread"])
    assert tables.reported("seed_grpo_table4b")["label"].tolist()[:2] == ["0.01", "0.01"]


def test_an_unknown_table_is_refused_in_one_line() -> None:
    with pytest.raises(ValueError, match=r"^Unknown table 'gcpo_tabel1'\. Did you mean 'gcpo_table1'\? Valid .+\.$"):
        tables.reported("gcpo_tabel1")


def test_the_means_of_our_methods() -> None:
    assert tables.paper_means("seed_grpo_table4a", task="average") == {"dr_grpo": 51.4, "seed_grpo": 56.6}
    found = tables.paper_means("gcpo_table6", task="narrativeqa", metric="f1")
    assert found == {"qhawkeye": 71.63, "egspo": 71.84, "r2vpo": 72.52, "gcpo_cd": 73.25, "gcpo_bot": 73.82}


@pytest.mark.parametrize(
    ("name", "where", "said"),
    [
        ("gcpo_table1", {"task": "narrativeqa"}, "gcpo_table1 has 27 numbers where .+; one per method is needed"),
        ("gcpo_table1", {"task": "gsm8k"}, "gcpo_table1 has 0 numbers"),
        ("gcpo_table1", {"tsk": "qasper"}, "gcpo_table1 has no column 'tsk'. Did you mean 'task'"),
        ("gcpo_table3", {"task": "math"}, "gcpo_table3 has no column 'method'"),
    ],
)
def test_means_that_are_not_one_per_method_are_refused(name: str, where: dict[str, str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        tables.paper_means(name, **where)


# --- the papers' own arithmetic ---------------------------------------------------------------------------------------

# Printed averages that are not the mean of their row: what the mean of the printed cells is. The first three are one
# number: with 20.0 for AIME24, not 0.2, the mean is 38.16; 0.2 seems to be a fraction among percentages.
WRONG_AVERAGES = {
    f"seed_grpo_table2|Qwen2.5-Math-base 7B|{BASE7}": "34.2",
    f"seed_grpo_table4a|Baseline 7B|{BASE7}": "34.2",
    f"seed_grpo_table4e|Base|{BASE7}": "34.2",
    f"seed_grpo_table2|SEED-GRPO 7B (Linear, α=0.02)+|{BASE7}": "54.08",  # printed: 54.73
    f"seed_grpo_table4e|Base|{R1}": "37.46",  # printed: 51.4; MATH, MIN, OLY and Avg. are those of Dr. GRPO 7B
    "egpo_table2|EGPO|": "64.99",  # printed: 65.97; so C5, with 65.54, is above EGPO
}


def test_averages_are_the_means_of_their_rows() -> None:
    wrong = {}
    for name in SHA256:
        table = read(name)
        if "average" not in set(table.get("task", ())):
            continue
        table = table[(table["metric"] == "accuracy")].assign(name=name, model=table.get("model", ""))
        for key, row in table.groupby(["name", "label", "model"], sort=False):
            cells = row.set_index("task")["value"].map(Decimal)
            if "average" in cells:
                printed = cells.pop("average")
                mean = sum(cells, Decimal(0)) / len(cells)
                if abs(mean - printed) > Decimal(1).scaleb(printed.as_tuple().exponent):  # the cells are rounded too
                    wrong["|".join(key)] = str(round(mean, 2).normalize())
    assert wrong == WRONG_AVERAGES


# Printed gains that are not the difference to the base model: what the difference of the printed scores is.
WRONG_GAINS = {"cw_grpo_table2|GRPO + Gaussian Reweight (ours)|Qwen2.5-Math-7B-Instruct|average": "5.3"}  # printed: 4.3


def test_gains_are_differences_to_the_base_model() -> None:
    wrong = {}
    for name in ("egpo_table1", "cw_grpo_table2"):
        table = read(name)
        by = ["model", "task"]
        base = table[table["label"].str.contains("Base")].set_index(by)["value"].map(Decimal)
        score = table[table["metric"] == "accuracy"].set_index(["label", *by])["value"].map(Decimal)
        for row in table[table["metric"] == "accuracy_gain"].itertuples():
            gain = score[row.label, row.model, row.task] - base[row.model, row.task]
            if gain != Decimal(row.value):
                wrong[f"{name}|{row.label}|{row.model}|{row.task}"] = str(gain)
    assert wrong == WRONG_GAINS


def test_gains_over_grpo_are_relative_in_gcpo_table_1() -> None:
    table = read("gcpo_table1")
    score = table.set_index(["method", "task", "metric"])["value"].map(float)
    for row in table[table["unit"] == "relative percent"].itertuples():
        key = (row.task, row.metric.removesuffix("_gain"))
        relative = 100 * (score[row.method, *key] / score["grpo", *key] - 1)
        assert relative == pytest.approx(float(row.value), abs=0.00501), row


def test_percentages_of_counts_in_cw_grpo_table_2() -> None:
    table = select("cw_grpo_table2: clip_cov|Qwen2.5-Math-7B-Instruct").set_index(["task", "metric"])["value"]
    for benchmark in select("cw_grpo_table4: questions").itertuples():
        assert table[benchmark.task, "questions"] == benchmark.value
        share = 100 * int(table[benchmark.task, "correct"]) / int(benchmark.value)
        assert f"{share:.1f}" == table[benchmark.task, "accuracy"]


LINEAR = "SEED-GRPO 7B (Linear, α=0.02)"
REPEATED = {  # rows that a table repeats of another
    "gcpo_table6: gcpo_cd": "gcpo_table1: gcpo_cd",
    "gcpo_table6: gcpo_bot": "gcpo_table1: gcpo_bot",
    "gcpo_table2: Qwen2.5-Math-1.5B": "seed_grpo_table2: Qwen2.5-Math-base 1.5B",
    "gcpo_table2: seed_grpo": "seed_grpo_table2: seed_grpo|Qwen2.5-Math-1.5B",
    "seed_grpo_table3: dr_grpo": "seed_grpo_table2: Dr.GRPO 7B",
    "seed_grpo_table3: SimpleRL-Zoo 7B": "seed_grpo_table2: SimpleRL-Zoo 7B",
    "seed_grpo_table3: dapo": "seed_grpo_table2: dapo",
    "seed_grpo_table3: G=8 steps=928": f"seed_grpo_table2: {LINEAR}",
    "seed_grpo_table3: G=16 steps=360": "seed_grpo_table4d: G=16",
    "seed_grpo_table4a: Baseline 7B": "seed_grpo_table2: Qwen2.5-Math-base 7B",
    "seed_grpo_table4a: dr_grpo": "seed_grpo_table2: Dr.GRPO 7B",
    "seed_grpo_table4a: seed_grpo": f"seed_grpo_table2: {LINEAR}",
    "seed_grpo_table4b: alpha=0.02": f"seed_grpo_table2: {LINEAR}",
    "seed_grpo_table4c: f=linear": f"seed_grpo_table2: {LINEAR}",
    "seed_grpo_table4d: G=8": f"seed_grpo_table2: {LINEAR}",
    "seed_grpo_table4d: G=16": "seed_grpo_table2: SEED-GRPO 7B (Linear, α=0.02, G=16)",
    "seed_grpo_table4e: Base|Qwen2.5-Math-1.5B": "seed_grpo_table2: Qwen2.5-Math-base 1.5B",
    "seed_grpo_table4e: dr_grpo|Qwen2.5-Math-1.5B": "seed_grpo_table2: Dr.GRPO 1.5B",
    "seed_grpo_table4e: seed_grpo|Qwen2.5-Math-1.5B": "seed_grpo_table2: seed_grpo|Qwen2.5-Math-1.5B",
    f"seed_grpo_table4e: Base|{BASE7}": "seed_grpo_table2: Qwen2.5-Math-base 7B",
    f"seed_grpo_table4e: dr_grpo|{BASE7}": "seed_grpo_table2: Dr.GRPO 7B",
    f"seed_grpo_table4e: seed_grpo|{BASE7}": "seed_grpo_table4d: G=16",
    f"seed_grpo_table4e: seed_grpo|{R1}": f"seed_grpo_table2: {R1}",
    "egpo_table2: Base": "egpo_table1: Qwen2.5-Math-1.5B (Base)",
    "egpo_table2: egpo": "egpo_table1: Qwen2.5-Math-1.5B + EGPO (ours)",
    "cw_grpo_table3: grpo|steps=100": "cw_grpo_table2: grpo|DeepSeek-R1-Distill-Qwen-1.5B",
    "cw_grpo_table3: cw_grpo|steps=100": "cw_grpo_table2: cw_grpo|DeepSeek-R1-Distill-Qwen-1.5B",
}
CONTRADICTED = {("egpo_table2: egpo", "math500"), ("egpo_table2: egpo", "gsm8k")}  # 76.40, 81.43 and 74.00, 79.83


def test_rows_that_are_printed_twice_agree() -> None:
    found = set()
    for again, first in REPEATED.items():
        one, other = numbers(again), numbers(first)
        assert len(set(one) & set(other)) >= 1, again
        found |= {(again, task) for task, metric in set(one) & set(other) if one[task, metric] != other[task, metric]}
    assert found == CONTRADICTED


# EGPO, App. A.3: what EGPO is above the best of GRPO, DAPO and EDGE-GRPO, in the order of the columns of its Table 1.
# On AIME24 the first model's EGPO is below EDGE-GRPO, and the text says so without a number.
MARGINS = {
    "Qwen2.5-Math-1.5B": "2.00 -3.34 1.91 3.31 5.15",
    "Qwen2.5-Math-7B": "3.10 2.91 3.01 3.31 3.41",
    "DeepSeek-R1-Distill-Qwen-1.5B": "3.35 6.66 4.19 2.57 2.13",
    "DeepSeek-R1-Distill-Qwen-7B": "2.00 6.67 4.77 2.58 2.13",
}


@pytest.mark.parametrize("model", MARGINS)
def test_egpo_is_above_the_best_other_by_what_its_appendix_says(model: str) -> None:
    score = {m: numbers(f"egpo_table1: {m}|{model}") for m in ("grpo", "dapo", "edge_grpo", "egpo")}
    for column, said in zip(score["egpo"], MARGINS[model].split(), strict=True):
        best = max(score[other][column][0] for other in ("grpo", "dapo", "edge_grpo"))
        assert score["egpo"][column][0] - best == Decimal(said), column


def change(name: str, after: str, before: str) -> Decimal:
    return cell(f"{name}: {after}") - cell(f"{name}: {before}")


def test_what_the_texts_say_of_their_tables() -> None:
    seven = "average|Qwen2.5-Math-7B"
    assert change("seed_grpo_table4a", f"seed_grpo|{seven}", f"dr_grpo|{seven}") == Decimal("5.2")  # sections 4.2, 4.3
    assert change("seed_grpo_table4d", "G=16|average", "G=8|average") == Decimal("1.6")  # section 4.2
    assert change("seed_grpo_table4d", "G=16|aime24", "G=8|aime24") == 10
    small = "average|Qwen2.5-Math-1.5B"
    assert change("seed_grpo_table4e", f"seed_grpo|{small}", f"Base|{small}") == Decimal("10.4")  # section 4.3
    assert change("seed_grpo_table4e", f"seed_grpo|{seven}", f"Base|{seven}") == 20
    distilled = "average|accuracy|DeepSeek-R1-Distill-Qwen-1.5B"
    assert change("cw_grpo_table2", f"cw_grpo|{distilled}", f"grpo|{distilled}") == Decimal("2.7")  # section 3.2
    assert change("cw_grpo_table3", "grpo|steps=200|math500", "grpo|steps=100|math500") == Decimal("79.8") - 85
    kept = select("cw_grpo_table3: cw_grpo|math500")["value"]
    assert (kept.min(), kept.max()) == ("86.2", "87.0")


def test_what_the_texts_say_against_their_tables() -> None:
    """Each assertion is what the table has; the comment, what the text says."""
    assert change("seed_grpo_table4a", "seed_grpo|aime24", "dr_grpo|aime24") == Decimal("3.4")  # 4.3: "13.4%"
    assert cell(f"seed_grpo_table4e: seed_grpo|{R1}|amc") == Decimal("78.3")  # section 4.3: "71.2%"
    assert cell(f"seed_grpo_table4e: seed_grpo|{R1}|aime24") == 50  # section 4.3: "46.7%"
    larger = "average|accuracy|Qwen2.5-Math-7B-Instruct"
    assert change("cw_grpo_table2", f"cw_grpo|{larger}", f"grpo|{larger}") == Decimal("2.6")  # section 3.2: "+2.4"
    best = max(select("egpo_table2: gsm8k")["value"].map(Decimal))
    assert best == cell("egpo_table2: egpo|gsm8k")  # 4.3: C5 raises the ceiling "on some benchmarks (e.g., GSM8K)"
