"""Correct answers of public benchmarks, and near wrong ones, as GCPO would embed them.

A near wrong answer is of the same kind as a correct one: the answer to another question on the same story or paper, the
title of another paragraph, or the correct solution with the last digit of its answer raised by one. Texts are read from
``$GCPO_DATA_DIR`` and stay in memory.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from gcpo.rewards import boxed_answer
from gcpo.tasks import gsm8k, qasper, sources
from gcpo.tasks.base import DATA_DIR

YES_NO = {"yes": "no", "no": "yes"}


class Question(NamedTuple):
    """The correct answers to a question, and near wrong ones."""

    right: Sequence[str]
    near: Sequence[str]


class Pool(NamedTuple):
    """The distinct texts of a benchmark and, of each question, the places of correct and of near wrong ones."""

    texts: list[str]
    right: list[list[int]]
    near: list[list[int]]


def pool(questions: Iterable[Question]) -> Pool:
    """Return the texts of questions, each once; surrounding white space does not count."""
    place: dict[str, int] = {}

    def places(texts: Iterable[str]) -> list[int]:
        return list(dict.fromkeys(place.setdefault(text.strip(), len(place)) for text in texts))

    listed = [(places(question.right), places(question.near)) for question in questions]
    return Pool(list(place), [right for right, _ in listed], [near for _, near in listed])


def of_one_text(texts: Iterable[Sequence[Sequence[str]]]) -> Iterator[Question]:
    """Questions on the same text, given by their correct answers: answers to the others are near wrong ones."""
    for asked in texts:
        for own in asked:
            yield Question(own, [answer for other in asked for answer in other if answer not in own])


def changed(text: str, answer: str) -> list[str]:
    """Return a text with the last digit of its answer, where that stands last, raised by one (9 becomes 0).

    Nothing for an answer without a digit, or that is not in the text.
    """
    digit = re.search(r"\d(?=\D*$)", answer)
    before, found, after = text.rpartition(answer) if digit else ("", "", "")
    if not (digit and found):
        return []
    raised = str((int(digit[0]) + 1) % 10)
    return [before + answer[: digit.start()] + raised + answer[digit.end() :] + after]


def _records(benchmark: str, *splits: str) -> Iterator[dict[str, Any]]:
    for split in splits:
        source = sources(benchmark)[split]
        with source.file(os.environ[DATA_DIR]).open(encoding="utf-8") as lines:
            for record in map(json.loads, lines):
                source.record.of(record)  # names a field that is wrong
                yield record


def _narrativeqa() -> Iterator[Question]:
    books: dict[str, list[list[str]]] = {}
    for record in _records("narrativeqa", "test"):
        books.setdefault(record["document"]["id"], []).append([answer["text"] for answer in record["answers"]])
    return of_one_text(books.values())


def _qasper() -> Iterator[Question]:
    papers = map(qasper.Paper.of, _records("qasper", "train", "validation", "test"))
    return of_one_text([row.references for row in paper.rows()] for paper in papers)


def _hotpotqa() -> Iterator[Question]:
    for record in _records("hotpotqa", "train", "test"):
        answer, titles = record["answer"], record["context"]["title"]
        near = [YES_NO[answer]] if answer in YES_NO else [title for title in titles if title != answer]
        yield Question([answer], near)


def _math() -> Iterator[tuple[list[str], str]]:
    for record in _records("math", "train"):
        yield [record["solution"]], boxed_answer(record["solution"]) or ""


def _olympiadbench() -> Iterator[tuple[list[str], str]]:
    for record in _records("olympiadbench", "train"):  # one file for both splits
        yield record["solution"], record["answer"]


def _gsm8k() -> Iterator[tuple[list[str], str]]:
    for record in _records("gsm8k", "train"):
        yield [record["answer"]], gsm8k.final_line(record["answer"]) or ""


def _solved(problems: Callable[[], Iterator[tuple[list[str], str]]], whole: bool) -> Iterator[Question]:
    """Problems with their solutions, which GCPO embeds (App. E.3), or with their final answers."""
    for solutions, answer in problems():
        texts = solutions if whole else [answer]
        yield Question(texts, changed(texts[0], answer))


BENCHMARKS: dict[str, Callable[[], Iterator[Question]]] = {
    "narrativeqa": _narrativeqa,
    "qasper": _qasper,
    "hotpotqa": _hotpotqa,
    "math": partial(_solved, _math, True),
    "olympiadbench": partial(_solved, _olympiadbench, True),
    "gsm8k": partial(_solved, _gsm8k, True),
    "math_answers": partial(_solved, _math, False),
    "olympiadbench_answers": partial(_solved, _olympiadbench, False),
}
"""The benchmarks that GCPO trains on, GSM8K, and final answers where GCPO embeds solutions."""


def read(benchmark: str) -> Pool:
    """Return the texts of a benchmark, from its files below ``$GCPO_DATA_DIR``.

    Raises:
        FileNotFoundError: the variable is not set, or the files are not there.
        MalformedRowError: a record with a wrong field.
    """
    if DATA_DIR not in os.environ:
        raise FileNotFoundError(f"{DATA_DIR} is not set: let it name a folder with <benchmark>/<split>.jsonl")
    return pool(BENCHMARKS[benchmark]())
