"""HotpotQA, distractor setting: questions that need two of ten paragraphs (Hub: hotpotqa/hotpot_qa).

The context is all ten paragraphs; where they are longer than the budget, paragraphs that do not support the answer are
left out, the last first. ``context: supporting`` is the two that support the answer, and leaves questions out for which
they are longer than :data:`gcpo.tasks.base.MAX_SUPPORTING_WORDS`. The Hub's validation split is our test split, as
its own test split has no answers; there is no validation split.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

from pydantic import Field

from gcpo.rewards import exact_match, token_f1
from gcpo.tasks.base import MAX_SUPPORTING_WORDS, Row, made_of, text_task, words
from gcpo.tasks.reading import Anything, Fields, MalformedRowError, Rows, Source, Text, fields, reader

MAX_CONTEXT_WORDS = 1200
"""Words of the paragraphs that a prompt keeps; ten have 600 to 1200."""

PROMPT = """Read the paragraphs and answer the question in a few words. Write the answer in the form "Answer: ...".

{context}

Question: {question}"""


class Context(Fields):
    """Paragraphs, each a title and its sentences."""

    title: Annotated[list[Text], Field(min_length=1)]
    sentences: list[list[Anything]]


class Facts(Fields):
    """Titles of the paragraphs that support the answer."""

    title: list[Anything]


def rows_of(supporting: bool) -> Rows:
    """Return the function that makes the question of a record, with the supporting paragraphs alone or all ten."""

    @fields
    def rows(id: Text, question: Text, answer: Text, context: Context, supporting_facts: Facts) -> list[Row]:
        titles, sentences = context.title, context.sentences
        most = MAX_SUPPORTING_WORDS if supporting else MAX_CONTEXT_WORDS
        if len({*titles}) != len(titles) or len(sentences) != len(titles):
            counts = f"{len(titles)} titles, {len({*titles})} of them different, and {len(sentences)} paragraphs"
            raise MalformedRowError(f"field 'context' has {counts}")
        paragraphs = {title: f"{title}: {''.join(told).strip()}" for title, told in zip(titles, sentences, strict=True)}
        for title in reversed(titles):
            if not supporting and sum(len(text.split()) for text in paragraphs.values()) <= most:
                break
            if title not in supporting_facts.title:
                paragraphs.pop(title)
        read, shortened = words("\n\n".join(paragraphs.values()), most)
        cut = shortened or len(paragraphs) < len(titles)
        row = made_of(PROMPT, id, (answer.strip(),), cut=cut, context=read, question=question.strip())
        return [] if supporting and shortened else [row]

    return rows


def score(prediction: str | None, references: Sequence[str]) -> dict[str, float]:
    """Return accuracy (F1 above 0.5), exact match, and F1 with the rule that yes and no must be equal, as the official
    evaluation has both."""
    f1 = token_f1(prediction, references, yes_no_rule=True)
    return {"accuracy": float(f1 > 0.5), "em": exact_match(prediction, references), "f1": f1}


_TRAIN = Source(rows_of(supporting=False), "hotpotqa", "train", "hotpotqa/hotpot_qa", "distractor")
SPLITS = {"train": _TRAIN, "test": replace(_TRAIN, split="validation")}
CONTEXTS = {"supporting": reader(SPLITS, rows=rows_of(supporting=True))}
TASK = text_task("hotpotqa", reader(SPLITS), metrics=("accuracy", "em", "f1"), score=score)
