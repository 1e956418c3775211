"""Questions of a chaos run: each answer is what the recipe gives without a cache, or full attention's and says so."""

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from fusionkv.fusion_worker.evaluate.data.stories import story
from fusionkv.fusion_worker.evaluate.data.words import NamePool
from fusionkv.gateway.client.results import Answer
from fusionkv.gateway.tokens import Vocabulary
from fusionkv.protos.deadline import Deadline
from fusionkv.protos.runtime import errors
from tests.chaos.judge import Judge, Recipe
from tests.chaos.process import Wrong
from tests.chaos.world import World
from tests.system.prompts import asked

CORPUS, PAGES, STORIES, QUESTIONS, ANSWER = "chaos", 8, 3, 12, 8
RECIPES = (("full_attention", 1.0), ("full_reuse", 0.0), ("prophetkv", 0.15), ("prophetkv", 1.0), ("a3", 0.15))
# Longest that an answer may take while nothing but the cache has a fault: its bounds are 0.5 s to look up and 2 s to
# fetch, the rest is for a machine that others use.
MOST_SECONDS = 40.0
ASK_SECONDS = 60.0
# While somebody does not answer on purpose: an honest error is all that is to come.
SHORT_SECONDS = 4.0
# What a caller may be told then. INTERNAL, UNKNOWN and the like are bugs.
UPSET = (errors.Unavailable, errors.DeadlineExceeded, errors.ResourceExhausted)


@dataclass
class Answers:
    """Asks the gateway and the workers."""

    world: World
    dice: random.Random
    seen: Counter[str]
    slowest: float = 0.0
    questions: list[tuple[str, list[Recipe]]] = field(default_factory=list)
    """With the recipes that answer it alike whatever rounding does."""
    pages: dict[str, str] = field(default_factory=dict)

    async def prepare(self) -> None:
        """Ingests the stories, and learns the answers while all is well."""
        chance, client = random.Random(1), self.world.client
        names, texts = NamePool(chance), []
        for number in range(STORIES):
            made, questions = story(chance, names, PAGES)
            for place, page in enumerate(made):
                self.pages[f"{number}-{place}.txt"] = page.text
            texts += [q.text for q in chance.sample(questions, QUESTIONS // STORIES)]
        for name, text in self.pages.items():
            await client.ingest(CORPUS, name, text, timeout=60)
        self.judge = Judge(self.world.judge_client, self.pages, ANSWER)
        for text in texts:
            # Left out where two numbers are so near each other that rounding decides.
            recipes = [recipe for recipe in RECIPES if await self._is_settled(text, recipe)]
            self.seen["recipes left out: rounding decides"] += len(RECIPES) - len(recipes)
            if RECIPES[0] in recipes:
                self.questions.append((text, recipes))
        if len(self.questions) < QUESTIONS // 2:
            raise Wrong(f"only {len(self.questions)} of {QUESTIONS} questions have one answer")

    async def _is_settled(self, text: str, recipe: Recipe) -> bool:
        for _ in range(2):  # computed first, then reused
            answer = await self._ask(text, recipe, 60)
            if answer.text != await self.judge.answer(text, recipe, answer.sources):
                return False
        return True

    async def _ask(self, text: str, recipe: Recipe, timeout: float) -> Answer:
        name, ratio = recipe
        return await self.world.client.ask(
            CORPUS, text, recipe=name, ratio=ratio, top_k=PAGES, max_tokens=ANSWER, timeout=timeout
        )

    async def question(self, may_fail: bool) -> None:
        if self.dice.random() < 0.15:
            await self._give_up()
            return
        with self._upset("a question", may_fail) as seconds:
            began = time.monotonic()
            await self.gateway_once(seconds)
            if not may_fail:
                self._took(time.monotonic() - began)

    async def gateway_once(self, timeout: float) -> bool:
        """Asks something of the gateway, checks the answer; whether it was degraded."""
        question, recipes = self.dice.choice(self.questions)
        recipe = self.dice.choice(sorted(recipes))
        answer = await self._ask(question, recipe, timeout)
        summary = answer.summary
        if len(answer.sources) != PAGES:
            raise Wrong(f"{len(answer.sources)} of {PAGES} pages were retrieved for {question!r}")
        right = await self.judge.answer(question, RECIPES[0] if summary.degraded else recipe, answer.sources)
        if answer.text != right:
            documents = [source.document for source in answer.sources]
            raise Wrong(f"{recipe} of {question!r} over {documents}: {answer.text!r}, not {right!r}; {summary}")
        return self._answered(summary.degraded, summary.degraded_reason)

    async def prefix(self, may_fail: bool) -> None:
        with self._upset("a worker", may_fail) as seconds:
            await self.prefix_once(seconds)

    async def prefix_once(self, timeout: float) -> bool:
        """Asks a worker for what is lossless when it is reused: wrong bytes would show in the answer."""
        client, (question, _) = self.dice.choice(self.world.worker_clients), self.dice.choice(self.questions)
        vocabulary = Vocabulary(await client.model(Deadline.after(timeout)))
        passages = [self.pages[name] for name in sorted(self.pages)[: self.dice.choice((3, PAGES))]]
        answers = []
        for recipe in ("prefix_cache", "full_attention"):
            request = asked(vocabulary, passages, question, ANSWER, recipe=recipe, tenant="prefix")
            events = [event async for event in client.generate(request, Deadline.after(timeout))]
            answers.append([event.token.id for event in events if event.HasField("token")])
            if recipe == "prefix_cache":
                degraded, reason = events[-1].summary.degraded, events[-1].summary.degraded_reason
        if answers[0] != answers[1]:
            raise Wrong(f"prefix_cache of {question!r}: {answers[0]}, full attention {answers[1]}; {reason}")
        return self._answered(degraded, reason)

    async def _give_up(self) -> None:
        """Asks, and goes away at some moment."""
        question, _ = self.dice.choice(self.questions)
        asking = asyncio.ensure_future(self._ask(question, ("prophetkv", 0.15), SHORT_SECONDS))
        await asyncio.wait([asking], timeout=self.dice.expovariate(10))
        asking.cancel()
        with contextlib.suppress(asyncio.CancelledError, *UPSET):
            await asking
        self.seen["given up"] += 1

    async def ingest(self, may_fail: bool) -> None:
        """Stores a page again, which changes nothing."""
        name = self.dice.choice(sorted(self.pages))
        with self._upset("an ingest", may_fail) as seconds:
            await self.world.client.ingest(CORPUS, name, self.pages[name], timeout=seconds)
            self.seen["pages ingested again"] += 1

    @contextlib.contextmanager
    def _upset(self, what: str, may_fail: bool) -> Iterator[float]:
        """A call that has so many seconds, and may end with an honest error if it `may_fail`."""
        try:
            yield SHORT_SECONDS if may_fail else ASK_SECONDS
        except UPSET as error:
            if not may_fail:
                raise Wrong(f"the cache alone has a fault, and {what} failed: {error!r}") from error
            self.seen[f"errors: {type(error).__name__}"] += 1

    def _took(self, seconds: float) -> None:
        self.slowest = max(self.slowest, seconds)
        if seconds > MOST_SECONDS:
            raise Wrong(f"the cache alone has a fault, and an answer took {seconds:.1f} s")

    def _answered(self, degraded: bool, reason: str) -> bool:
        self.seen["answers"] += 1
        if degraded:
            self.seen["answers, degraded"] += 1
            if not reason:
                raise Wrong("an answer is degraded and does not say why")
        return degraded
