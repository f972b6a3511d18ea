"""HotpotQA, distractor setting: questions that need two of ten paragraphs (Hub: hotpotqa/hotpot_qa).

The context is all ten paragraphs; where they are longer than the budget, paragraphs that do not support the answer are
left out, the last first. The Hub's validation split is our test split, as its own test split has no answers; there is
no validation split.
"""

from __future__ import annotations

from dataclasses import replace

from gcpo.tasks import narrativeqa
from gcpo.tasks.base import MalformedRowError, Record, Row, Source, field, hotpot_scores, reader, words

MAX_CONTEXT_WORDS = 1200
"""Words of the paragraphs that a prompt keeps; ten have 600 to 1200."""

PROMPT = """Read the paragraphs and answer the question in a few words. Write the answer in the form "Answer: ...".

{context}

Question: {question}"""


def convert(record: Record) -> list[Row]:
    """Return the question of a record."""
    titles = [field(record, f"context.title.{n}", str) for n in range(len(field(record, "context.title", list)))]
    sentences = field(record, "context.sentences", list)
    if len(sentences) != len(titles):
        raise MalformedRowError(f"field 'context' has {len(titles)} titles and {len(sentences)} paragraphs")
    supporting = set(field(record, "supporting_facts.title", list, empty=True))
    paragraphs = {title: f"{title}: {''.join(parts).strip()}" for title, parts in zip(titles, sentences, strict=True)}
    cut = False
    for title in reversed(titles):
        if sum(len(text.split()) for text in paragraphs.values()) <= MAX_CONTEXT_WORDS:
            break
        if title not in supporting:
            cut = bool(paragraphs.pop(title, None)) or cut
    context, shortened = words("\n\n".join(paragraphs.values()), MAX_CONTEXT_WORDS)
    prompt = PROMPT.format(context=context, question=field(record, "question", str).strip())
    return [Row(field(record, "id", str), prompt, (field(record, "answer", str).strip(),), cut or shortened)]


HUB = ("hotpotqa/hotpot_qa", "distractor")
SPLITS = {"train": Source("hotpotqa", "train", *HUB), "test": Source("hotpotqa", "validation", *HUB)}
TASK = replace(
    narrativeqa.TASK,
    name="hotpotqa",
    metrics=("accuracy", "em", "f1"),
    load=reader(SPLITS, convert),
    score=hotpot_scores,
)
