"""NarrativeQA: questions about books and films, answered from a summary (Hub: deepmind/narrativeqa).

The context is the summary, not the full story, which no small model can hold; GCPO does not say which it used.
``context: supporting`` is the part of the summary that is most like the question (:func:`passage`). Every question has
two references. Splits are the Hub's: train, validation and test.
"""

import math
import re
from collections import Counter
from dataclasses import replace
from typing import Annotated

from pydantic import Field

from gcpo.rewards import normalise
from gcpo.tasks.base import MAX_SUPPORTING_WORDS, Row, made_of, text_task, words
from gcpo.tasks.reading import Fields, Rows, Source, Text, fields, reader, text_id

MAX_CONTEXT_WORDS = 1000
"""Words of the summary that a prompt keeps, from its beginning. Most summaries have 400 to 900; a longer one is cut,
which can cost the passage that has the answer."""

PROMPT = """Read the summary and answer the question in a few words. Write the answer in the form "Answer: ...".

Summary: {summary}

Question: {question}"""


class Written(Fields):
    """A text."""

    text: Text


class Document(Fields):
    """A book or film."""

    id: Text
    summary: Written


def passage(text: str, question: str) -> str:
    """Return a text from the sentence on whose next :data:`MAX_SUPPORTING_WORDS` words are most like the question.

    TF-IDF: the sum over the question's words of how often they stand there, times the logarithm of the number of
    sentences over that of those with the word. Of equal places the first. The answer is not looked at.
    """
    sentences = re.split(r"(?<=[.!?])\s+", text)
    told = [normalise(sentence).split() for sentence in sentences]
    having = Counter(word for one in told for word in {*one})
    value = {word: math.log(len(told) / having[word]) for word in {*normalise(question).split()} if word in having}

    def likeness(start: int) -> float:
        read, _ = words(" ".join(sentences[start:]), MAX_SUPPORTING_WORDS)
        return sum(value.get(word, 0.0) for word in normalise(read).split())

    return " ".join(sentences[max(range(len(sentences)), key=likeness) :])


def rows_of(supporting: bool) -> Rows:
    """Return the function that makes the question of a record, with a passage of the summary or its beginning."""

    @fields
    def rows(
        document: Document, question: Written, answers: Annotated[list[Written], Field(min_length=1)]
    ) -> list[Row]:
        text, asked = document.summary.text.strip(), question.text.strip()
        most = MAX_SUPPORTING_WORDS if supporting else MAX_CONTEXT_WORDS
        summary, _ = words(passage(text, asked) if supporting else text, most)
        row_id = f"{document.id}:{text_id(asked)}"  # the data set numbers documents, not questions
        references, cut = [answer.text.strip() for answer in answers], summary.split() != text.split()
        return [made_of(PROMPT, row_id, references, cut=cut, document=document.id, summary=summary, question=asked)]

    return rows


READ = ("document.id", "document.summary.text", "question.text", "answers")  # the stories are most of 16 GB


_SOURCE = Source(rows_of(supporting=False), "narrativeqa", "", "deepmind/narrativeqa", columns=READ)
SPLITS = {name: replace(_SOURCE, split=name) for name in ("train", "validation", "test")}
CONTEXTS = {"supporting": reader(SPLITS, rows=rows_of(supporting=True))}
TASK = text_task("narrativeqa", reader(SPLITS))
