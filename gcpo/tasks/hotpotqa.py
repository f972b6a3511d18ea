"""HotpotQA, distractor setting: questions that need two of ten paragraphs (Hub: hotpotqa/hotpot_qa).

The context is all ten paragraphs; where they are longer than the budget, paragraphs that do not support the answer are
left out, the last first. The Hub's validation split is our test split, as its own test split has no answers; there is
no validation split.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from pydantic import Field

from gcpo.tasks import narrativeqa
from gcpo.tasks.base import Row, hotpot_scores, made_of, words
from gcpo.tasks.reading import Anything, Fields, MalformedRowError, Record, Source, Text, reader

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


class Question(Record):
    """A record of the Hub."""

    id: Text
    question: Text
    answer: Text
    context: Context
    supporting_facts: Facts

    def rows(self) -> list[Row]:
        """Return its question."""
        titles, sentences = self.context.title, self.context.sentences
        if len({*titles}) != len(titles) or len(sentences) != len(titles):
            counts = f"{len(titles)} titles, {len({*titles})} of them different, and {len(sentences)} paragraphs"
            raise MalformedRowError(f"field 'context' has {counts}")
        paragraphs = {title: f"{title}: {''.join(told).strip()}" for title, told in zip(titles, sentences, strict=True)}
        for title in reversed(titles):
            if sum(len(text.split()) for text in paragraphs.values()) <= MAX_CONTEXT_WORDS:
                break
            if title not in self.supporting_facts.title:
                paragraphs.pop(title)
        context, shortened = words("\n\n".join(paragraphs.values()), MAX_CONTEXT_WORDS)
        cut, question = shortened or len(paragraphs) < len(titles), self.question.strip()
        return [made_of(PROMPT, self.id, (self.answer.strip(),), cut=cut, context=context, question=question)]


SPLITS = {
    name: Source(Question, "hotpotqa", split, "hotpotqa/hotpot_qa", "distractor")
    for name, split in (("train", "train"), ("test", "validation"))
}
METRICS = ("accuracy", "em", "f1")
TASK = replace(narrativeqa.TASK, name="hotpotqa", metrics=METRICS, load=reader(SPLITS), score=hotpot_scores)
