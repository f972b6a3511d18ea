"""tinyqa: questions about short generated passages, made to be answered by a very small model.

A *fact* is a person, a relation and a value; a value is a pair of attributes ("black", "cat"), so that wrong answers
come at graded distances: another wording of the same value (a paraphrase), one attribute changed (a near miss), the
value of somebody else, or a value of another relation (unrelated). Every value has two wordings, and both are
references. Facts, not questions, are split: no fact of the test split occurs in any other split.
"""

import functools
import hashlib
import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gcpo.tasks.base import SHARES, generator, text_task

PEOPLE = """Ada Ben Cleo Dan Eva Finn Gus Hana Ivan Jane Karl Lena Mira Nils Olga Paul Rosa Sami Tina Uma Vera Walt
Yara Zoe Amir Bela Carl Dora Emil Faye Gina Hugo Iris Jack Kira Leo Maya Noah Otto Ruth""".split()


@dataclass(frozen=True)
class Relation:
    """One kind of fact: the verb by which a passage states it, the word by which a question asks for it, and the two
    wordings of its values.

    ``general`` words a value with one attribute left out. ``first`` and ``second`` list each attribute as (form in
    the first wording, form in the second wording).
    """

    verb: str
    asks: str
    wordings: tuple[str, str]
    general: str
    first: tuple[tuple[str, str], ...]
    second: tuple[tuple[str, str], ...]

    def wording(self, value: tuple[int, int], form: int) -> str:
        """Return the value in words; ``form`` is 0 or 1."""
        return self.wordings[form].format(a=self.first[value[0]][form], b=self.second[value[1]][form])


def _forms(attributes: str) -> tuple[tuple[str, str], ...]:
    """Return each attribute's form in the first wording and in the second: those on the sides of a slash, or one."""
    return tuple((form.split("/")[0], form.split("/")[-1]) for form in attributes.split(", "))


# Of each relation: name, verb, question word, both wordings and the general one; first attributes; second attributes.
_TABLE = """
pet; keeps; what; a {a} {b}; a {b} that is {a}; a {b}
black, white, grey, brown, spotted
cat, dog, rabbit, parrot, horse, goat

work; works as; what; a {a} at the {b}; a {b} {a}; a {a}
nurse, teacher, cook, guard, painter, driver
hospital, school, hotel, museum, theatre, station

home; lives in; what; a {a} {b}; a {a} {b}; a {a}
house, flat, cabin, farm, boat
by the sea/on the coast, in the city/in the town, in the hills/up the mountain, near the forest/close to the woods

hobby; enjoys; what; {a} {b}; {b} , {a} them; {b}
collecting/gathering, repairing/fixing, drawing/sketching, selling/trading, cleaning/washing
clocks, coins, maps, toys, lamps, shoes

trip; travels; how; by {a} to {b}; to {b} on a {a}; to {b}
train, bus, ship, plane, bicycle
Rome, Paris, Cairo, Delhi, Lima, Oslo

food; eats; what; {a} {b}; {b} that tastes {a}; {b}
sweet, spicy, salty, fresh, sour
soup, bread, rice, pie, salad, fish
"""


def _relations() -> Iterator[tuple[str, Relation]]:
    for block in _TABLE.strip().split("\n\n"):
        says, first, second = block.splitlines()
        name, verb, asks, one, other, general = says.split("; ")
        yield name, Relation(verb, asks, (one, other), general, _forms(first), _forms(second))


RELATIONS = dict(_relations())

# Who is asked about indirectly in a two-hop question: the passage says "Tom is the brother of Ada ."
LINKS = ("brother", "sister", "friend", "neighbour", "boss")

Fact = tuple[str, str, tuple[int, int]]  # (person, relation, value)


@functools.cache
def values(person: str, relation: str, split: str) -> tuple[tuple[int, int], ...]:
    """Return the values that a person's relation may take in a split: a share of all values, in the order of a hash, so
    that every split has some and no fact is in two splits."""
    spec = RELATIONS[relation]
    pairs = itertools.product(range(len(spec.first)), range(len(spec.second)))
    ordered = sorted(pairs, key=lambda value: hashlib.sha256(repr((person, relation, value)).encode()).digest())
    low, high = (round(share * len(ordered)) for share in SHARES[split])
    return tuple(ordered[low:high])


@dataclass(frozen=True)
class Passage:
    """Three facts about two people in words; ``link`` says that the first person is the ``link`` of the second."""

    text: str
    facts: tuple[Fact, ...]
    link: str


@dataclass(frozen=True)
class Question:
    """A question about one fact of a passage; two hops when the person is named through the link."""

    text: str
    fact: Fact
    passage: Passage
    hops: int

    @property
    def references(self) -> list[str]:
        """The value in both wordings."""
        _, relation, value = self.fact
        return [RELATIONS[relation].wording(value, form) for form in (0, 1)]


def passage(rng: random.Random, split: str) -> Passage:
    """Draw a passage: two facts about one person, one about another, and a link, in random order and wording."""
    people = rng.sample(PEOPLE, 2)
    relations = rng.sample(list(RELATIONS), 2)
    # The second person shares a relation with the first: reading the relation alone does not give the answer.
    owners = [(people[0], relations[0]), (people[0], relations[1]), (people[1], rng.choice(relations))]
    facts = tuple((who, relation, rng.choice(values(who, relation, split))) for who, relation in owners)
    link = rng.choice(LINKS)
    statements = [f"{people[0]} is the {link} of {people[1]} ."]
    for who, relation, value in facts:
        spec = RELATIONS[relation]
        statements.append(f"{who} {spec.verb} {spec.wording(value, rng.randrange(2))} .")
    rng.shuffle(statements)
    return Passage(" ".join(statements), facts, link)


def questions(rng: random.Random, about: Passage) -> list[Question]:
    """Return a question for each fact, in random order; those about the first person take two hops half of the time."""
    found = []
    for fact in rng.sample(about.facts, len(about.facts)):
        who, hops = fact[0], 1
        if who == about.facts[0][0] and rng.random() < 0.5:
            who, hops = f"the {about.link} of {about.facts[2][0]}", 2
        spec = RELATIONS[fact[1]]
        found.append(Question(f"{who} {spec.verb} {spec.asks} ?", fact, about, hops))
    return found


def near_miss(rng: random.Random, spec: Relation, value: tuple[int, int]) -> tuple[int, int]:
    """Return another value of a relation, with one of the two attributes changed."""
    if rng.random() < 0.5:
        return (value[0] + rng.randrange(1, len(spec.first))) % len(spec.first), value[1]
    return value[0], (value[1] + rng.randrange(1, len(spec.second))) % len(spec.second)


def wrong_answer(rng: random.Random, to: Question, kind: str) -> str:
    """Return a wrong answer at a distance: "near" (one attribute changed), "other" (another fact of the passage)
    or "unrelated" (a value of another relation)."""
    _, relation, value = to.fact
    if kind == "other":
        _, relation, value = rng.choice([fact for fact in to.passage.facts if fact != to.fact])
    elif kind == "unrelated":
        relation = rng.choice([name for name in RELATIONS if name != relation])
        value = rng.choice(values(to.fact[0], relation, "train"))
    else:
        value = near_miss(rng, RELATIONS[relation], value)
    return RELATIONS[relation].wording(value, rng.randrange(2))


def draw(rng: random.Random, split: str) -> tuple[str, Sequence[str]]:
    """Draw a question of a split with its passage, and its references."""
    question = questions(rng, passage(rng, split))[0]
    return f"{question.passage.text} {question.text}", question.references


TASK = text_task("tinyqa", generator("tinyqa", draw))
