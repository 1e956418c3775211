"""Generates stories of several pages, with questions whose answers are known."""

import random
from dataclasses import dataclass, field, replace

from fusionkv.fusion_worker.evaluate.data import words
from fusionkv.fusion_worker.evaluate.data.words import NamePool

SYSTEM = "Answer the question using the passages.\n"
TASKS = ("single", "multikey", "multiquery", "multivalue", "twohop", "chain1", "chain2", "coref")
CROSS_CHUNK = ("multivalue", "twohop", "chain1", "chain2", "coref")
# The size of the samples that the reference models are trained for and evaluated on: pages of a prompt, and of other
# stories among them; approximate tokens of a page. Each is a minimum and a maximum.
_PAGES, _FOREIGN, _TOKENS = (8, 8), (0, 2), (34, 50)
# Facts of a story; of chains of scores, the depth of each.
_CODES, _OWNERS, _HOUSES, _CHAINS, _ROLES = 3, 2, 2, (2, 2), 2


@dataclass(frozen=True)
class Question:
    """A question about a sample.

    Attributes:
        task: one of TASKS.
        needs: the pages that the answer needs, in reading order; the last one has the last link of a chain.
    """

    task: str
    text: str
    answer: str
    needs: tuple[int, ...]


@dataclass(frozen=True)
class Page:
    """A page of a story."""

    title: str
    sentences: tuple[str, ...]

    @property
    def text(self) -> str:
        return "".join(f"{sentence}." for sentence in (f"Report {self.title}", *(f" {s}" for s in self.sentences)))


@dataclass(frozen=True)
class Sample:
    """The pages of a prompt, in document order, and all questions about them."""

    pages: tuple[Page, ...]
    questions: tuple[Question, ...]


def filler(rng: random.Random) -> str:
    noun, adjective, verb = rng.choice(words.NOUNS), rng.choice(words.ADJECTIVES), rng.choice(words.VERBS)
    kind = rng.randrange(3)
    if kind == 0:
        return f"The {noun} is {adjective}"
    if kind == 1:
        return f"A {adjective} {noun} {verb} {rng.choice(words.PREPOSITIONS)} the {rng.choice(words.NOUNS)}"
    return f"On {rng.choice(words.DAYS)} the {noun} {verb}"


def _length(sentences: list[str]) -> int:
    """Approximate number of tokens: one per word and full stop, one more per name."""
    every = [word for sentence in sentences for word in sentence.split()]
    return len(sentences) + len(every) + sum(word[0].isupper() and word not in words.FUNCTION for word in every)


@dataclass
class _Story:
    """A story under construction."""

    rng: random.Random
    names: NamePool
    title: str
    pages: list[list[str]]
    questions: list[Question] = field(default_factory=list)

    def put(self, page: int, what: str) -> None:
        self.pages[page].append(what)

    def ask(self, task: str, text: str, answer: str, *needs: int) -> None:
        self.questions.append(Question(task, f"Report {self.title}: {text}?", answer, needs))

    def pick(self, count: int) -> list[int]:
        """`count` different pages in order."""
        return sorted(self.rng.sample(range(len(self.pages)), count))

    def number(self, digits: int) -> str:
        return str(self.rng.randrange(10 ** (digits - 1), 10**digits))

    def add_single(self) -> None:
        name, age, page = self.names.person(), self.number(2), self.pick(1)[0]
        self.put(page, f"The age of {name} is {age}")
        self.ask("single", f"age of {name}", age, page)

    def add_codes(self, count: int) -> None:
        known: list[tuple[str, str, int]] = []
        for i in range(count):
            name = self.names.near(known[i - 1][0]) if i % 2 else self.names.person()
            code, page = self.number(3), self.pick(1)[0]
            known.append((name, code, page))
            self.put(page, f"The code of {name} is {code}")
            self.ask("multikey", f"code of {name}", code, page)
        for _ in range(count // 2):
            (a, x, p), (b, y, q) = self.rng.sample(known, 2)
            self.ask("multiquery", f"codes of {a} and {b}", f"{x} and {y}", p, q)

    def add_owner(self, items: list[str]) -> None:
        name, pages = self.names.short(), self.pick(2)
        for page, item in zip(pages, items, strict=True):
            self.put(page, f"{name} owns the {item}")
        self.ask("multivalue", f"items of {name}", " and ".join(items), *pages)

    def add_house(self, city: str) -> None:
        host, guest = self.names.short(), self.names.short()
        first, second = self.pick(2)
        self.put(first, f"The city of {host} is {city}")
        self.ask("single", f"city of {host}", city, first)
        self.put(second, f"{guest} stays with {host}")
        self.ask("twohop", f"city of {guest}", city, first, second)

    def add_chain(self, depth: int) -> None:
        pages, previous = self.pick(min(depth + 1, len(self.pages))), ""
        score = self.number(2)
        for i, page in enumerate(pages):
            name = self.names.short()
            if previous:
                self.put(page, f"{name} scored like {previous}")
                self.ask(f"chain{i}", f"score of {name}", score, *pages[: i + 1])
            else:
                self.put(page, f"{name} scored {score}")
            previous = name

    def add_roles(self, items: list[str]) -> None:
        (role,), pages = self.rng.choices(words.ROLES), self.pick(2 * len(items))
        for first, second, item in zip(pages[::2], pages[1::2], items, strict=True):
            name = self.names.short()
            self.put(first, f"The {role} is {name}")
            self.put(second, f"The {role} chose the {item}")
            self.ask("coref", f"choice of {name}", item, first, second)

    def finish(self) -> list[Page]:
        """Fills the pages up to their length, and shuffles their sentences."""
        for page in self.pages:
            target = self.rng.randint(*_TOKENS) - 6
            while _length(page) < target - 4 or not page:
                page.append(filler(self.rng))
            self.rng.shuffle(page)
        return [Page(self.title, tuple(page)) for page in self.pages]


def story(rng: random.Random, names: NamePool, pages: int) -> tuple[list[Page], list[Question]]:
    """A story of `pages` pages. Sentences refer only to earlier pages."""
    made = _Story(rng, names, names.title(), [[] for _ in range(pages)])
    roles = min(_ROLES, pages // 2)
    items = rng.sample(words.ITEMS, 2 * _OWNERS + roles)
    made.add_single()
    made.add_codes(_CODES)
    for i in range(_OWNERS):
        made.add_owner(items[2 * i : 2 * i + 2])
    for city in names.places(_HOUSES):
        made.add_house(city)
    for depth in _CHAINS:
        made.add_chain(depth)
    if roles:
        made.add_roles(items[2 * _OWNERS :])
    return made.finish(), made.questions


def foreign_page(rng: random.Random, names: NamePool) -> Page:
    """A page of another story, some of whose references are not in the prompt."""
    made = _Story(rng, names, names.title(), [[]])
    kinds = rng.sample(range(5), 3)
    if 0 in kinds:
        made.add_single()
    if 1 in kinds:
        made.add_codes(1)
    if 2 in kinds:
        made.put(0, f"{names.short()} owns the {rng.choice(words.ITEMS)}")
    if 3 in kinds:
        made.put(0, f"{names.short()} stays with {names.short()}")
    if 4 in kinds:
        made.put(0, f"{names.short()} scored like {names.short()}")
    return made.finish()[0]


def sample(rng: random.Random) -> Sample:
    """The sample of a prompt: a story, with pages of other stories before or after it."""
    names = NamePool(rng)
    total = rng.randint(*_PAGES)
    foreign = rng.randint(*_FOREIGN)
    before = rng.randint(0, foreign)
    pages, questions = story(rng, names, total - foreign)
    others = [foreign_page(rng, names) for _ in range(foreign)]
    questions = [replace(q, needs=tuple(page + before for page in q.needs)) for q in questions]
    return Sample(tuple(others[:before] + pages + others[before:]), tuple(questions))
