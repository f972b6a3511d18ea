"""NarrativeQA: questions about books and films, answered from a summary (Hub: deepmind/narrativeqa).

The context is the summary, not the full story, which no small model can hold; GCPO does not say which it used. Every
question has two references. Splits are the Hub's: train, validation and test.
"""

from typing import Annotated

from pydantic import Field

from gcpo.tasks.base import Row, made_of, text_task, words
from gcpo.tasks.reading import Fields, Source, Text, fields, reader, text_id

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


@fields
def rows(document: Document, question: Written, answers: Annotated[list[Written], Field(min_length=1)]) -> list[Row]:
    """Return the question of a record."""
    summary, cut = words(document.summary.text.strip(), MAX_CONTEXT_WORDS)
    asked = question.text.strip()
    row_id = f"{document.id}:{text_id(asked)}"  # the data set numbers documents, not questions
    references = [answer.text.strip() for answer in answers]
    return [made_of(PROMPT, row_id, references, cut=cut, summary=summary, question=asked)]


READ = ("document.id", "document.summary.text", "question.text", "answers")  # the stories are most of 16 GB
SPLITS = {
    name: Source(rows, "narrativeqa", name, "deepmind/narrativeqa", columns=READ)
    for name in ("train", "validation", "test")
}
TASK = text_task("narrativeqa", reader(SPLITS))
