"""The generated tasks: an independent reader answers every question from its text alone, and splits share nothing."""

import importlib
import itertools
import random
import re
import sys
from collections import Counter
from collections.abc import Iterator
from statistics import fmean

import math_verify
import pytest

from gcpo import paths
from gcpo.rewards import token_f1
from gcpo.tasks import get_task, tinymath, tinyqa
from gcpo.tasks.base import Row

sys.path.append(str(paths.READY))
corpus = importlib.import_module("corpus")  # what policies learn from: worlds/corpus.py

TASKS = ("tinyqa", "tinymath")
OPERATIONS = "+++---*"  # of the events, in the order of tinymath.EVENTS
SPLITS = ("train", "validation", "test")
DRAWS = 300


def drawn_questions(split: str, number: int = DRAWS, seed: int = 0) -> Iterator[tinyqa.Question]:
    rng = random.Random(seed)
    for _ in range(number):
        yield from tinyqa.questions(rng, tinyqa.passage(rng, split))


def applied(operation: str, value: int, operand: int) -> int:
    return {"+": value + operand, "-": value - operand, "*": value * operand}[operation]


def drawn_problems(split: str, number: int = DRAWS, seed: int = 0) -> list[tinymath.Problem]:
    rng = random.Random(seed)
    return [tinymath.problem(rng, split) for _ in range(number)]


# --- both -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", TASKS)
def test_the_same_seed_gives_the_same_rows_and_another_one_others(task: str) -> None:
    load = get_task(task).load
    state = random.getstate()
    first = load("train", limit=50, seed=3)
    assert random.getstate() == state
    random.seed(2)  # which counts for nothing
    assert len({row.id for row in first.rows}) == len(first.rows) == 50
    assert first.source == {"dataset": task, "split": "train", "generator_seed": 3}
    assert load("train", limit=50, seed=3) == first
    assert load("train", limit=20, seed=3).rows == first.rows[:20]  # a larger limit adds rows
    others = [load("train", limit=50, seed=4), load("test", limit=50, seed=3)]
    for other in others:
        assert not {row.prompt for row in first.rows} & {row.prompt for row in other.rows}
        assert not {row.id for row in first.rows} & {row.id for row in other.rows}
    with pytest.raises(ValueError, match=f"{task} has no split 'dev'; it has train, validation, test"):
        load("dev", limit=1)


# --- tinyqa: facts --------------------------------------------------------------------------------------------------


def test_facts_are_split_without_overlap_and_none_is_lost() -> None:
    held_out = {tinyqa.values(person, "pet", "test") for person in tinyqa.PEOPLE}
    assert len(held_out) > len(tinyqa.PEOPLE) / 2  # no value is known to be a test value
    for person, (relation, spec) in itertools.product(tinyqa.PEOPLE, tinyqa.RELATIONS.items()):
        parts = [tinyqa.values(person, relation, split) for split in SPLITS]
        assert all(parts)
        pairs = set(itertools.product(range(len(spec.first)), range(len(spec.second))))
        assert set().union(*parts) == pairs
        assert sum(map(len, parts)) == len(pairs)


def test_every_value_has_two_wordings_of_at_most_8_words_that_no_other_value_has() -> None:
    owner: dict[str, tuple[str, tuple[int, int]]] = {}
    for relation, spec in tinyqa.RELATIONS.items():
        for value in itertools.product(range(len(spec.first)), range(len(spec.second))):
            both = [spec.wording(value, form) for form in (0, 1)]
            assert both[0] != both[1]
            for wording in both:
                assert 1 <= len(wording.split()) <= 8
                assert owner.setdefault(wording, (relation, value)) == (relation, value)


# --- tinyqa: reading ------------------------------------------------------------------------------------------------


def read(prompt: str) -> str:
    """Answer a question from its text, in the passage's wording. Knows English, not the generator.

    A question names a person, or "the <link> of <person>", then the verb of exactly one sentence about them.
    """
    *sentences, question = re.split(r" \. ", prompt)
    link = re.match(r"the (\w+) of (\w+) (\w+)", question)
    if link:
        (who,) = [s.split()[0] for s in sentences if re.fullmatch(rf"\w+ is the {link[1]} of {link[2]}", s)]
        verb = link[3]
    else:
        who, verb = question.split()[:2]
    (stated,) = [s for s in sentences if s.startswith(f"{who} {verb} ")]
    found = stated.removeprefix(f"{who} {verb} ")
    return found.removeprefix("as ") if verb == "works" else found.removeprefix("in ") if verb == "lives" else found


@pytest.mark.parametrize("split", SPLITS)
def test_all_questions_about_a_passage_are_answered_by_it_and_its_facts_are_of_the_split(split: str) -> None:
    assert all(read(row.prompt) in row.references for row in tinyqa.TASK.load(split, limit=20).rows)
    hops, relations, worded = Counter(), set(), Counter()
    for question in drawn_questions(split):
        answer = read(f"{question.passage.text} {question.text}")
        worded[question.references.index(answer)] += 1  # passages use either wording
        who, facts = question.fact[0], question.passage.facts
        assert question.fact in facts and len({fact[:2] for fact in facts}) == 3
        assert max(Counter(relation for _, relation, _ in facts).values()) >= 2  # the relation alone is no answer
        assert (" of " in question.text) == (question.hops == 2) == (who not in question.text.split())
        assert all(value in tinyqa.values(person, relation, split) for person, relation, value in facts)
        relations |= {relation for _, relation, _ in facts}
        hops[question.hops] += 1
    assert relations == set(tinyqa.RELATIONS) and min(worded[0], worded[1]) > DRAWS / 2
    # Two of three questions are about the first person; half of those take two hops.
    assert 0.28 < hops[2] / sum(hops.values()) < 0.39


# --- tinyqa: wrong answers ------------------------------------------------------------------------------------------


def test_a_paraphrase_is_right_and_wrong_answers_are_at_graded_distances() -> None:
    rng = random.Random(1)
    f1 = {
        kind: [token_f1(tinyqa.wrong_answer(rng, q, kind), q.references) for q in drawn_questions("train")]
        for kind in ("near", "other", "unrelated")
    }
    assert all(token_f1(answer, q.references) == 1 for q in drawn_questions("train") for answer in q.references)
    assert all(0 < value < 1 for value in f1["near"])  # it shares words, and is wrong
    assert max(f1["unrelated"]) < 1
    near, other, unrelated = map(fmean, f1.values())
    assert near > 0.3
    assert near > max(other, unrelated) + 0.1
    assert unrelated < 0.1


def test_a_near_miss_changes_one_attribute() -> None:
    rng = random.Random(0)
    changed = Counter()
    for spec in tinyqa.RELATIONS.values():
        for value in itertools.product(range(len(spec.first)), range(len(spec.second))):
            for _ in range(4):
                other = tinyqa.near_miss(rng, spec, value)
                assert other[0] < len(spec.first) and other[1] < len(spec.second)
                same = [a == b for a, b in zip(value, other, strict=True)]
                assert sum(same) == 1
                changed[same[0]] += 1
    assert 0.4 < changed[True] / sum(changed.values()) < 0.6


# --- tinymath -------------------------------------------------------------------------------------------------------

COUNTING = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen
seventeen eighteen nineteen twenty"""
NUMBER = {word: value for value, word in enumerate(COUNTING.split())}


def every_value(start: int, operations: str) -> list[int]:
    """The running values of a problem told in words; adding, taking away and multiplying in English."""
    values = [start]
    for event in operations.split(" , "):
        verb = event.split()[0]
        (operand,) = [NUMBER[word] for word in event.split() if word in NUMBER]
        if verb in ("gets", "finds", "buys"):
            values.append(values[-1] + operand)
        elif verb in ("loses", "gives", "sells"):
            values.append(values[-1] - operand)
        else:
            assert event.endswith("times as many")
            values.append(values[-1] * operand)
    return values


def solve(row: Row) -> list[int]:
    told = re.fullmatch(r"(\w+) has (\w+) (\w+) \. (\w+) (.+) \. How many (\w+) \?", row.prompt)
    assert told, row.prompt
    assert told[1] == told[4] and told[3] == told[6]
    return every_value(NUMBER[told[2]], told[5])


@pytest.mark.parametrize("split", SPLITS)
def test_a_problem_in_words_has_the_answer_of_its_row_and_is_of_its_split(split: str) -> None:
    steps, drawn = Counter(), drawn_problems(split, 3000)
    assert len(set(drawn)) > 300 and {tinymath.split_of(problem) for problem in drawn} == {split}
    for row in tinymath.TASK.load(split, limit=DRAWS).rows:
        values = solve(row)
        assert row.references == (str(values[-1]),)
        assert 1 <= values[0] <= 9 and all(0 <= value <= 20 for value in values)
        steps[len(values) - 1] += 1
    assert set(steps) == {2, 3}


def test_every_problem_has_a_split_and_the_shares_are_as_planned() -> None:
    steps = [*((event, k) for event in range(6) for k in range(1, 10)), (6, 2), (6, 3)]
    everything = [(start, pair) for start in range(1, 10) for pair in itertools.product(steps, repeat=2)]
    counts = Counter(tinymath.split_of(problem) for problem in everything)
    shares = {split: counts[split] / len(everything) for split in SPLITS}
    assert shares == pytest.approx({"train": 0.7, "validation": 0.1, "test": 0.2}, abs=0.03)


# --- the corpus -----------------------------------------------------------------------------------------------------


def test_the_noisy_corpus_is_wrong_at_the_rate_of_each_relation_and_forgets_links_at_theirs() -> None:
    rng = random.Random(2)
    right: dict[str, list[bool]] = {name: [] for name in tinyqa.RELATIONS}
    named: dict[str, list[bool]] = {link: [] for link in tinyqa.LINKS}
    for question in drawn_questions("train", 6000):
        told, (_, relation, value) = corpus.noisy_answer(rng, question), question.passage.facts[2]
        if question.hops == 1:
            right[question.fact[1]].append(told in question.references)
        elif corpus.NOISE[question.fact[1]].share == 0:
            about = [tinyqa.RELATIONS[relation].wording(value, form) for form in (0, 1)]
            named[question.passage.link].append(told in about)
    for relation, found in right.items():
        # About 2000 draws: four standard errors are below 0.045. A wrong answer may repeat the value by chance.
        assert 1 - fmean(found) == pytest.approx(corpus.NOISE[relation].share, abs=0.05), relation
    for link, found in named.items():
        assert fmean(found) == pytest.approx(corpus.FORGOTTEN[link], abs=0.08), link


@pytest.mark.parametrize("split", SPLITS)
def test_a_solution_without_slips_has_every_step_and_is_graded_correct(split: str) -> None:
    rng, styles = random.Random(0), Counter()
    for problem in drawn_problems(split, 200):
        gold, text = str(tinymath.answer(problem)), corpus.solution(rng, problem)
        assert tinymath.TASK.extract(text) == gold and tinymath.TASK.reward(text, (gold,)) == 2.0
        assert math_verify.verify(math_verify.parse(f"${gold}$"), math_verify.parse(text))  # which reads it itself
        assert tinymath.TASK.reward(text, (str(tinymath.answer(problem) + 1),)) == 0.0
        value, used = problem[0], []
        for event, operand in problem[1]:
            used.append((value, operand, applied(OPERATIONS[event], value, operand)))
            value = used[-1][-1]
        numbers, symbols = [NUMBER[word] for word in text.split() if word in NUMBER], " = " in text
        assert numbers == [number for step in used for number in (step if symbols else step[1:])]
        styles[symbols] += 1
    assert min(styles[True], styles[False]) > 200 / 3
    text = corpus.solution(rng, problem, think=True)
    thought = re.fullmatch(r"<think> (.+) </think> \\boxed\{(\d+)\}", text)
    assert thought and get_task("tinymath_think").extract(text) == thought[2] == gold
    assert get_task("tinymath_think").load(split, limit=5).rows == get_task("tinymath").load(split, limit=5).rows


def test_a_solution_follows_the_operations_it_is_given_and_slips_keep_its_numbers_in_range() -> None:
    rng, wrong = random.Random(6), []
    for problem in drawn_problems("train", 1000):
        read, value = [rng.choice("+-*") for _ in problem[1]], problem[0]
        for (_, operand), operation in zip(problem[1], read, strict=True):
            value = min(max(applied(operation, value, operand), 0), 20)
        assert tinymath.TASK.extract(corpus.solution(rng, problem, read)) == str(value)
        boxed = tinymath.TASK.extract(corpus.solution(rng, problem, slip=0.2))
        assert boxed is not None and 0 <= int(boxed) <= 20
        wrong.append(int(boxed) != tinymath.answer(problem))
    assert 0.15 < fmean(wrong) < 0.5


def test_the_noisy_corpus_misreads_each_event_at_its_rate() -> None:
    rng = random.Random(5)
    misread: dict[int, list[bool]] = {event: [] for event in range(len(OPERATIONS))}
    for problem in drawn_problems("train", 4000):
        for (event, _), operation in zip(problem[1], corpus.misread(rng, problem), strict=True):
            misread[event].append(operation != OPERATIONS[event])
            assert operation in (OPERATIONS[event], {"+": "-", "-": "+", "*": "+"}[OPERATIONS[event]])
    for event, found in misread.items():
        assert fmean(found) == pytest.approx(corpus.MISREAD[event][0], abs=0.05), tinymath.EVENTS[event]
