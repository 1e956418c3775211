"""The curricula of the reference models: stages of training, and their token sequences."""

import functools
import random
from dataclasses import dataclass, field, replace
from typing import Literal

from transformers import PreTrainedTokenizerFast

from fusionkv.fusion_worker.evaluate.data import words
from fusionkv.fusion_worker.evaluate.data.stories import PROMPT, SYSTEM, Mark, Page, Sample, Size, sample
from fusionkv.models.tokenizer import anchor_tokens, link_tokens

NONE = -100  # no target


@dataclass(frozen=True)
class Stage:
    """A stage of a curriculum. recall: the task of a stage without documents, see `Encoder`."""

    name: str
    batch: int
    recall: Literal["", "words", "spoken"] = ""
    size: Size = PROMPT
    questions: int = 18  # maximum number of questions about a sample
    advance: float = 0.88  # training accuracy of the worst task that ends the stage
    until: float = 1.0  # share of the run at which the stage ends in any case
    blind: float = 0.0  # share of questions whose rows see only the system text and the pages `Question.enough`
    alone: float = 0.0  # share of sequences whose pages are encoded alone, with link tokens after each (KVLink 2.3)


@dataclass(frozen=True)
class Recipe:
    """A curriculum and its optimiser settings.

    Attributes:
        stages: the stages, in order.
        steps: number of steps, including the learning rate's decay in the last quarter.
        base: the shipped model to start from; empty starts from random weights.
        links: numbers of link tokens after pages that are encoded alone, one drawn for each sequence.
        rates: percentages by which pages that are encoded alone are compressed to anchor tokens (KVLink 2.4), one
            drawn for each sequence; 0 does not compress.
        segment: tokens that are compressed together.
        rate: learning rate.
        auxiliary: weight of the loss of marks in the documents.
        least_steps: minimum number of steps of a stage.
    """

    stages: tuple[Stage, ...]
    steps: int
    base: str = ""
    links: tuple[int, ...] = ()
    rates: tuple[int, ...] = ()
    segment: int = 0
    rate: float = 4e-3
    auxiliary: float = 0.5
    least_steps: int = 50

    @property
    def anchors(self) -> dict[int, int]:
        """The segments' length for each percentage that anchor tokens save."""
        return {percent: self.segment for percent in self.rates if percent}


def _documents(blind: float, later: float) -> tuple[Stage, ...]:
    """The stages with documents. blind: its share in the first two, which teach references; later: in the others."""
    links = Size((3, 3), 0, (12, 18), codes=2, owners=0, houses=2, chains=(1, 1), roles=2, easy=True)
    # Three chains but two roles: with two possible answers a guess is right half the time, and runs got stuck there.
    one = Size((4, 4), 0, (22, 30), codes=2, owners=1, houses=2, chains=(1, 1, 1), roles=2)
    two = Size((5, 5), 0, (26, 36), codes=2, owners=2, houses=2, chains=(2, 2, 2), roles=2)
    three = Size((6, 7), 1, (30, 44), codes=3, owners=2, houses=2, chains=(2, 2, 2), roles=2)
    return (
        # A choice of two remains a guess. Once pages resolve two roles, a choice of four took 100 to 600 steps.
        Stage("links", 24, size=links, blind=blind, advance=0.85, until=0.25),
        Stage("choices", 24, size=replace(links, roles=4), blind=blind, advance=0.85),
        Stage("one", 24, size=one, blind=later, advance=0.85),
        Stage("two", 24, size=two, blind=later),
        # Names that begin alike are learnt in `full` at the latest: one seed stayed at 71% here for 12 minutes.
        Stage("three", 16, size=three, blind=later, advance=0.8, until=0.4),
        # Six names for codes, in pairs that share a syllable: with three, one seed read half a name for 30 minutes.
        # Scores with the same first digit: when only one pair in nine had it, a model found the second digit of a
        # score by its first, in any chain.
        Stage("full", 16, size=replace(PROMPT, codes=6, alike=True), questions=24, blind=later),
    )


def _linked() -> Recipe:
    """KVLink's fine-tuning (2.3, A.2): one model for 0, 1 and 5 link tokens; a quarter of the sequences are as usual.

    Only the answers count in the loss.
    """
    four = Size((4, 4), 0, (22, 30), codes=2, owners=1, houses=3, chains=(1, 1, 2), roles=2)
    stages = (Stage("four", 8, size=four, alone=0.75, advance=0.8, until=0.5), Stage("full", 8, alone=0.75))
    return Recipe(stages, steps=5500, base="eased-3", links=(0, 1, 5), rate=3e-3, auxiliary=0.0)


def _anchored() -> Recipe:
    """KVLink's compressed linking (2.4, A.6): one model for chunks compressed by 0, 50% and 75%, with 0 or 5 links.

    Short pages with few facts come first, then full prompts.
    """
    short = Size((3, 3), 0, (18, 26), codes=2, owners=1, houses=2, chains=(1, 1), roles=2)
    stages = (Stage("short", 12, size=short, alone=0.9, advance=0.8, until=0.35), Stage("full", 8, alone=0.85))
    return Recipe(
        stages, steps=4000, base="eased-3", links=(0, 5), rates=(0, 50, 75), segment=16, rate=3e-3, auxiliary=0.0
    )


_RECALL = (Stage("words", 32, "words", advance=0.9), Stage("spoken", 32, "spoken", advance=0.88))
RECIPES = {
    "forced": Recipe(_RECALL + _documents(blind=0.5, later=0.5), steps=5500),
    "eased": Recipe(_RECALL + _documents(blind=0.5, later=0.2), steps=5500),
    "linked": _linked(),
    "anchored": _anchored(),
}


@dataclass
class Sequence:
    """A row of a batch: a context, and questions packed after it that do not see each other.

    Lists have one entry per token, except `tasks`.

    Attributes:
        ids: token ids.
        position: positions.
        segment: 0 in the context, the question's number after it.
        page: 0 in the system text, the page's number in a page.
        only: for a blind question, the sum of 1 << page over the pages that it sees; 0 if it sees all pages.
        alone: 1 for tokens of a page that is encoded alone: they see only that page and the system text.
        text: the segment's number for text that anchor tokens replace, otherwise 0.
        reads: the segment that an anchor token reads, otherwise 0. No other token sees that segment's text.
        answer, resolved, owner: targets of the next token and of marks; NONE for no target.
        tasks: the task of each question.
    """

    ids: list[int] = field(default_factory=list)
    position: list[int] = field(default_factory=list)
    segment: list[int] = field(default_factory=list)
    page: list[int] = field(default_factory=list)
    only: list[int] = field(default_factory=list)
    alone: list[int] = field(default_factory=list)
    text: list[int] = field(default_factory=list)
    reads: list[int] = field(default_factory=list)
    answer: list[int] = field(default_factory=list)
    resolved: list[int] = field(default_factory=list)
    owner: list[int] = field(default_factory=list)
    tasks: list[str] = field(default_factory=list)

    @property
    def end(self) -> int:
        """The position after the last token."""
        return self.position[-1] + 1 if self.position else 0

    def extend_context(
        self, ids: list[int], page: int, alone: bool = False, at: int | None = None, text: int = 0, reads: int = 0
    ) -> None:
        """Adds tokens to the context. at: position of the first one; by default after all others."""
        count, first = len(ids), self.end if at is None else at
        self.alone += [int(alone)] * count
        self.position += range(first, first + count)
        self.ids += ids
        self.page += [page] * count
        self.text += [text] * count
        self.reads += [reads] * count
        for column in (self.segment, self.only):
            column += [0] * count
        for column in (self.answer, self.resolved, self.owner):
            column += [NONE] * count

    def ask(self, task: str, question: list[int], answer: list[int], end: int, only: int = 0) -> None:
        """Packs a question after the context. end: the last token to predict."""
        count = len(question) + len(answer)
        start = 1 + self.position[next((i for i, segment in enumerate(self.segment) if segment), len(self.ids)) - 1]
        self.tasks.append(task)
        self.position += range(start, start + count)
        self.ids += question + answer
        self.segment += [len(self.tasks)] * count
        self.page += [0] * count
        self.only += [only] * count
        for column in (self.alone, self.text, self.reads):
            column += [0] * count
        self.answer += [NONE] * (len(question) - 1) + answer + [end]
        self.resolved += [NONE] * count
        self.owner += [NONE] * count


class Encoder:
    """Turns samples into token sequences for training."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        links: tuple[int, ...] = (),
        rates: tuple[int, ...] = (),
        segment: int = 0,
    ) -> None:
        def encode(text: str) -> tuple[int, ...]:
            return tuple(tokenizer.encode(text, add_special_tokens=False))

        self._encode = functools.cache(encode)
        self._system = [tokenizer.bos_token_id, *encode(SYSTEM)]
        self._end = tokenizer.eos_token_id
        vocabulary = tokenizer.get_vocab()
        self._counts, pages = links, link_tokens(PROMPT.pages[1], max(links, default=0))
        self._links = [[vocabulary[token] for token in page] for page in pages]
        self._rates, self._segment = rates, segment
        self._anchors = {p: [vocabulary[token] for token in anchor_tokens(p, segment)] for p in rates if p}
        self._closing = encode("?\nAnswer:")
        heads, tails = [" " + s for s in words.FIRST], words.SECOND + words.THIRD + words.PLACE
        whole = words.ITEMS + words.ROLES + words.NOUNS + words.ADJECTIVES + words.FUNCTION + words.SHORT
        plain = [" " + w for w in whole]
        digits = list("0123456789") + [" " + d for d in "0123456789"]
        self._words = [encode(s)[0] for s in heads + tails + plain + digits]

    def make(self, rng: random.Random, stage: Stage) -> Sequence:
        """A new random sequence of a stage, from the training split."""
        if stage.recall:
            return self._recall_words(rng, stage.recall == "spoken")
        return self._documents(rng, sample(rng, "train", stage.size), stage)

    def _recall_words(self, rng: random.Random, spoken: bool) -> Sequence:
        """Random words, then some of them again as questions, each answered by the word that followed it.

        spoken: adds some of the words that end a question before the answer, so that the model learns to carry a key.
        """
        out = Sequence()
        out.extend_context(self._system, 0)
        drawn = rng.choices(self._words, k=rng.randint(24, 40))
        out.extend_context(drawn, 1)
        once = [i for i in range(len(drawn) - 1) if drawn.count(drawn[i]) == 1]
        for i in rng.sample(once, len(once)):
            close = self._closing[: rng.randint(0, len(self._closing))] if spoken else ()
            out.ask("words", [drawn[i], *close], [], drawn[i + 1])
        return out

    def _lay(self, column: list[int], at: int, mark: Mark | None, end: int) -> None:
        if mark:
            for i, token in enumerate(self._encode(mark.text)[: end - at]):
                column[at + i] = token

    def _documents(self, rng: random.Random, made: Sample, stage: Stage) -> Sequence:
        out = Sequence()
        out.extend_context(self._system, 0)
        alone = stage.alone > 0 and rng.random() < stage.alone
        each = rng.choice(self._counts) if alone else 0
        percent = rng.choice(self._rates) if alone and self._rates else 0
        for number, page in enumerate(made.pages, 1):
            if percent:
                self._compress(out, self._read(page), number, percent)
                out.extend_context(self._links[number - 1][:each], number)
                continue
            out.extend_context([t for p in ("Report", " " + page.title, ".") for t in self._encode(p)], number, alone)
            for sentence in page.sentences:
                starts = [len(out.ids)]
                for piece in sentence.pieces:
                    starts.append(starts[-1] + len(self._encode(piece)))
                out.extend_context([t for p in sentence.pieces for t in self._encode(p)], number, alone)
                if sentence.resolved:
                    self._lay(out.resolved, starts[sentence.resolved.piece + 1] - 1, sentence.resolved, starts[-1])
                if sentence.owner:
                    self._lay(out.owner, starts[sentence.owner.piece], sentence.owner, starts[-1])
            out.extend_context(list(self._encode("\n")), number, alone)
            if each:
                out.extend_context(self._links[number - 1][:each], number)
        asked = rng.sample(made.questions, min(stage.questions, len(made.questions)))
        for question in asked:
            text = [t for p in question_pieces(question.text) for t in self._encode(p)]
            answer = list(self._encode(" " + question.answer))
            blind = bool(question.enough) and rng.random() < stage.blind
            only = sum(1 << page + 1 for page in question.enough) if blind else 0
            how = f"'{each}" * alone + f"-{percent}" * (percent > 0)
            out.ask(question.task + "*" * blind + how, text, answer, self._end, only)
        return out

    def _read(self, page: Page) -> list[int]:
        """A page's tokens."""
        pieces = [*page.pieces, "\n"]
        return [token for piece in pieces for token in self._encode(piece)]

    def _compress(self, out: Sequence, page: list[int], number: int, percent: int) -> None:
        """Adds a page as segments, each followed by its anchor tokens, at the positions that the engine gives them.

        Anchor tokens follow each other. Each segment's text has the positions right before its own anchors, which
        other anchors have too. The first page leaves room for a segment before its anchors, as when encoded alone.
        """
        start = out.end + (min(self._segment, len(page)) if number == 1 else 0)
        for at in range(0, len(page), self._segment):
            stop = min(at + self._segment, len(page))
            text = page[max(0, stop - self._segment) : stop]
            anchors = self._anchors[percent][: -(-(stop - at) * (100 - percent) // 100)]
            segment = 1 + max(out.text, default=0)
            out.extend_context(text, number, True, at=start - len(text), text=segment)
            out.extend_context(anchors, number, True, at=start, reads=segment)
            start += len(anchors)


def question_pieces(text: str) -> list[str]:
    """The question part of a prompt, split between words so that each piece begins with a new token."""
    first, *rest = f"Question: {text}".split(" ")
    return [first, *(" " + word for word in rest), "\nAnswer:"]
