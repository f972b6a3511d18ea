"""Claims about the papers' own policies, decided by runs of the papers' profiles.

Nothing here trains or measures: :data:`CLAIMS` reads records, and a claim whose runs are not there is "not tested",
with the command that makes them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pandas as pd

from gcpo.reports import records
from gcpo.reports.alignment import FOUR, MEASURES, Alignment, comparisons
from gcpo.reports.claims import Verdict
from gcpo.reports.evidence import by_seed, decide
from gcpo.reports.headline import GCPO
from gcpo.reports.names import people
from gcpo.reports.opened import Report
from gcpo.runs.grids import owner
from gcpo.runs.profiles import load_profile
from gcpo.statistics import Draws

ENTROPIES, GEOMETRY = FOUR[:2], FOUR[2:]
TITLES = {"math": "MATH-500", "aime24": "AIME24", "olympiadbench": "OlympiadBench"}
SEED_7B = {"policy": "Qwen/Qwen2.5-Math-7B", "method": "seed_grpo"}
LINEAR = {"form": "linear", "estimator": "counts"}  # as Eq. 6 is printed; the grid has one alpha, 0.02, and G = 8
SEED_AIME24, SRPO_AIME24 = 46.7, 44.3  # as printed in section 4.2


def weaker_on_qasper(reference: bool = False) -> Verdict:
    """Return whether each measure of Figure 1 follows V more closely on NarrativeQA than on Qasper (App. D.8)."""
    return _on_both([(name,) for name in FOUR], reference)


def smaller_advantage_on_qasper(reference: bool = False) -> Verdict:
    """Return whether CD and BoT are further above each entropy on NarrativeQA than on Qasper (App. D.9)."""
    return _on_both([(own, other) for own in GEOMETRY for other in ENTROPIES], reference)


def limited_gains(reference: bool = False) -> Verdict:
    """Return whether both methods of GCPO gain on MATH-500 over GRPO, and there more than on AIME24 and OlympiadBench
    (section 4.3), for the policy that the text names.

    The paper's table has no row for GRPO; it is the one of the runs. AIME24 is asked of the policies trained on
    OlympiadBench, as in App. E.3.
    """
    grid = "paper_table2"
    found = _runs(grid, reference)
    found = found[found["policy"] == load_profile(str(owner(grid)))["policy"]]
    scores = {tuple(key): value for *key, value in _accuracy(found, "sampled").itertuples(index=False)}
    base = {(task, seed): value for (task, method, seed), value in scores.items() if method == "grpo"}
    rows = [
        (_on(method, task), seed, value - base[task, seed])
        for (task, method, seed), value in scores.items()
        if method in GCPO and (task, seed) in base
    ]
    rows += [("0", seed, 0.0) for seed in {row[1] for row in rows}]
    pairs = [(_on(method, "math"), "0") for method in GCPO]
    pairs += [(_on(method, "math"), _on(method, task)) for method in GCPO for task in TITLES if task != "math"]
    figures = pd.DataFrame(rows, columns=["label", "seed", "value"])
    return decide(by_seed(figures, pairs, "gain over GRPO in points").values(), command=_command(grid))


def beats_srpo(reference: bool = False) -> Verdict:
    """Return whether Pass@1 of SEED-GRPO 7B on AIME24 is above the one printed for SRPO 32B (section 4.2): greedy
    answers, of the trainings with 8 rollouts and Eq. 6 as it is printed."""
    grid = "paper_seed_table2"
    found = _runs(grid, reference)
    for key, value in {**SEED_7B, "task": "aime24"}.items():
        found = found[found[key] == value]
    found = found[found["method_options"].map(lambda options: options == LINEAR).astype(bool)]
    own = _accuracy(found, "greedy").rename(columns={"method": "label"})[["label", "seed", "value"]]
    pair = ("seed_grpo", "SRPO 32B, as printed")
    figures = pd.concat([own, own.assign(label=pair[1], value=SRPO_AIME24)])
    compared = by_seed(figures, [pair], "Pass@1 on AIME24 in points")
    return decide(compared.values(), [SEED_AIME24 - SRPO_AIME24], command=_command(grid))


# Id of the claim -> its place, its heading and the function that decides it.
CLAIMS: dict[str, tuple[str, str, Callable[[bool], Verdict]]] = {
    "gcpo-d8-qasper": ("GCPO App. D.8", "V is followed less closely on Qasper than on NarrativeQA", weaker_on_qasper),
    "gcpo-d9-advantage": ("GCPO App. D.9", "CD and BoT lead by less on Qasper", smaller_advantage_on_qasper),
    "gcpo-4-3-limited": ("GCPO section 4.3", "clear gains on MATH-500, smaller ones elsewhere", limited_gains),
    "seed-4-2-srpo": ("SEED-GRPO section 4.2", "SEED-GRPO 7B is above SRPO 32B on AIME24", beats_srpo),
}


def _on_both(measures: Sequence[tuple[str, ...]], reference: bool) -> Verdict:
    """Decide that the correlation with V of each measure, or of one less that of another, is larger on NarrativeQA than
    on Qasper, for the starting policy.

    Each data set has queries of its own, so that resamples of the two are independent.
    """
    grid, tasks = "paper_figure1", ("narrativeqa", "qasper")
    found = _runs(grid, reference)
    lines = records.gather(found[found["kind"] == "gradients"], "queries", ["task", "seed"])
    if lines.empty or not {*tasks} <= {*lines["task"]}:
        return decide([], closed=f"There are no runs on both data sets. First: {_command(grid)}.")
    each = [Alignment(lines[lines["task"] == task], drop_top=0.02, seed=seed) for seed, task in enumerate(tasks)]
    compared = {}
    for names in measures:
        one, other = (known.draws(*names) if len(names) == 1 else known.less(names[0], names[1]) for known in each)
        what = " − ".join(f"ρ({MEASURES[name]}, V)" for name in names)
        compared[f"{what}, NarrativeQA minus Qasper"] = _less(one, other)
    return decide(comparisons(compared))


def _less(one: Draws, other: Draws) -> Draws:
    """Return the difference of two estimates from independent samples."""
    drawn = min(len(one.draws), len(other.draws))
    return Draws(one.estimate - other.estimate, one.draws[:drawn] - other.draws[:drawn])


def _accuracy(found: pd.DataFrame, decoding: str) -> pd.DataFrame:
    """Return the accuracy of each trained policy's answers: task, method, seed and value, in per cent."""
    keys = ["task", "method", "seed"]
    trained = found[(found["kind"] == "train") & (found["max_steps"] > 0)]
    asked = found[(found["kind"] == "evaluate") & (found["at_step"] > 0)]
    lines = pd.concat([records.gather(trained, "eval", keys), records.gather(asked, "answers", keys)])
    if lines.empty:
        return pd.DataFrame({key: [] for key in (*keys, "value")})
    own = lines[lines["decoding"] == decoding]
    return own.groupby(keys)["accuracy"].mean().mul(100).rename("value").reset_index()


def _on(method: str, task: str) -> str:
    return f"{people(method)} on {TITLES[task]}"


def _runs(grid: str, reference: bool) -> pd.DataFrame:
    return records.find(str(owner(grid)), grid, reference)


def _command(grid: str) -> str:
    return Report(str(owner(grid)), grid).command
