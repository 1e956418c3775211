"""A small needle set in plain English, for models that read it: one fact, two facts, a fact behind a reference."""

import random

from fusionkv.bench.quality.data.samples import Sample, Task

_FIRST = ("harbour", "north", "granary", "winter", "old", "west", "tide", "copper", "orchard", "lamp", "map", "river")
_SECOND = ("archive", "tower", "gate", "garden", "mill", "wing", "station", "wall", "room", "cellar", "house", "shop")
_FILLER = (
    "The corridor was painted in the spring and smelled of it for weeks.",
    "Visitors are asked to leave their umbrellas at the desk.",
    "Rain is expected in the afternoon, with some wind from the coast.",
    "The committee met twice and wrote down very little.",
    "A second clock was put up because the first one was always late.",
    "Bread is delivered before six and rarely lasts until noon.",
    "Nobody could say who had planted the trees along the canal.",
    "The annual report was printed on both sides this time.",
    "Two bicycles have been standing by the fence since last year.",
    "The choir practises on Thursdays unless there is a holiday.",
)
_INSTRUCTION = "Answer the question using the passages. Give nothing but the answer.\n\n"
_PASSAGES, _SENTENCES = 8, 6
KINDS = ("one_fact", "two_facts", "reference")


def needles(kind: str, count: int) -> Task:
    """`count` samples of a kind; the same every time."""
    chance = random.Random(f"needles {kind}")
    return Task(
        f"needles_{kind}",
        tuple(_sample(chance, kind) for _ in range(count)),
        metrics=("string_match_all",),
        max_tokens=24,
        chat=True,
        first_line=True,
    )


def _sample(chance: random.Random, kind: str) -> Sample:
    names = [f"{a} {b}" for a, b in zip(chance.sample(_FIRST, 6), chance.sample(_SECOND, 6), strict=True)]
    codes = [str(chance.randrange(10_000, 100_000)) for _ in names]
    passages = [chance.sample(_FILLER, _SENTENCES - 2) for _ in range(_PASSAGES)]
    where = sorted(chance.sample(range(_PASSAGES), len(names)))
    for place, name, code in zip(where, names, codes, strict=True):
        _hide(chance, passages[place], f"The access code of the {name} is {code}.")
    if kind == "one_fact":
        question, answers = f"What is the access code of the {names[0]}?", codes[:1]
    elif kind == "two_facts":
        question, answers = f"What are the access codes of the {names[1]} and the {names[4]}?", [codes[1], codes[4]]
    else:
        # Behind what it refers to, in another passage.
        _hide(chance, passages[-1], f"The access code of the market kiosk is that of the {names[0]}.")
        question, answers = "What is the access code of the market kiosk?", codes[:1]
    texts = tuple(" ".join(sentences) + "\n\n" for sentences in passages)
    return Sample(_INSTRUCTION, texts, f"Question: {question}\n", tuple(answers), opening="Answer:")


def _hide(chance: random.Random, passage: list[str], fact: str) -> None:
    passage.insert(chance.randrange(len(passage) + 1), fact)
