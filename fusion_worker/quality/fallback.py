"""Falls back to full attention: where `fusionkv check` found a recipe unsafe, and where answers differ in service.

Verdicts are a file in the model's directory. In service, an idle worker repeats a share of the answers with full
attention, and raises the ratios of recipes of which too few match.
"""

import asyncio
import json
import logging
import random
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from opentelemetry import metrics

from fusionkv.fusion_worker.compute.engine import Engine
from fusionkv.fusion_worker.compute.jobs import Logits, Nothing
from fusionkv.fusion_worker.compute.kv_pool import KVPool
from fusionkv.fusion_worker.compute.planner import Planner
from fusionkv.fusion_worker.load.loader import Loader
from fusionkv.fusion_worker.prompt import Prompt
from fusionkv.fusion_worker.quality.defaults import UNMEASURED, Choice, Default
from fusionkv.protos.contract.names import recipe_label
from fusionkv.protos.contract.recipes import RECIPES, Recipe, find_recipe
from fusionkv.protos.contract.selectors import SecondModel
from fusionkv.protos.observe import telemetry
from fusionkv.protos.runtime.errors import FailedPrecondition, InvalidArgument

log = logging.getLogger(__name__)
meter = metrics.get_meter(__name__)
_answers = meter.create_counter("fusionkv.worker.shadow.answers", description="Answers compared with full attention")
_kl = meter.create_histogram(
    "fusionkv.worker.shadow.kl",
    unit="nat",
    description="KL divergence of the first token's distribution from full attention",
    explicit_bucket_boundaries_advisory=telemetry.NATS,
)
_skipped = meter.create_counter("fusionkv.worker.shadow.skipped", description="Samples dropped, by reason")
FILE = "fusionkv-check.json"
SAFE, UNSAFE, UNDECIDED = "safe", "unsafe", "not enough evidence"
# Samples are small (ids and one row of logits), but old ones are of little use.
_MAX_WAITING = 16
# Number of latest answers that decide. With 20, a true share of 95% falls below 80% once in 400 decisions.
SAMPLES = 20
_MIN_RAISED = 0.15  # minimum of a raised ratio
_MAX_KEYS = 1024
# Tokens of an answer that are computed at a time: with a vocabulary of 262,144, the logits of each take 1 MB.
_BLOCK = 64
# A recipe, a corpus, and whether the request's ratio was below the recipe's: low ratios are raised separately.
_Key = tuple[str, str, bool]


@dataclass(frozen=True, slots=True)
class Judged:
    """The verdict on a recipe at a ratio.

    Attributes:
        verdict: SAFE, UNSAFE or UNDECIDED.
        why: the reason, as a sentence.
        kl: mean KL divergence of the next token's distribution from full attention's, over full attention's answers,
            in nats; None without answers.
        low, high: 95% confidence interval of `kl`.
        agreement: share of those answers' tokens that stay the most likely; None without answers.
        off: answers whose mean divergence is above 1 nat a token.
        kept: answers all of whose tokens stay the most likely.
    """

    verdict: str
    ratio: float
    why: str
    kl: float | None = None
    low: float | None = None
    high: float | None = None
    agreement: float | None = None
    answers: int = 0
    off: int = 0
    kept: int = 0

    def __post_init__(self) -> None:
        """Raises ValueError for values that `fusionkv check` does not write."""
        if self.verdict not in (SAFE, UNSAFE, UNDECIDED) or not isinstance(self.ratio, float):
            raise ValueError(f"{self.verdict!r} at ratio {self.ratio!r} is not a verdict")


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdicts on a model's recipes.

    A recipe with modifiers that has no verdict gets that of the recipe without its last modifier. Recipes without any
    verdict are allowed.

    Attributes:
        fingerprint: of the model, in hex.
        recipes: verdicts by recipe, for one or more ratios, ascending.
        auxiliary: fingerprint in hex of the auxiliary model of the check; empty without one.
        default: what `default` means on the model.
    """

    fingerprint: str
    recipes: dict[str, tuple[Judged, ...]]
    auxiliary: str = ""
    default: Default = UNMEASURED

    @classmethod
    def read(cls, directory: Path, fingerprint: bytes, auxiliary: bytes = b"") -> "Verdict":
        """Reads the verdicts in a model's directory; there may be none.

        auxiliary: fingerprint of the auxiliary model in use. Verdicts that depend on another one are left out.

        Raises:
            FailedPrecondition: the file can't be read, or is for another model.
        """
        path, again = directory / FILE, f"run `fusionkv check {directory}` again"
        if not path.exists():
            return cls(fingerprint.hex(), {})
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            judged = {name: tuple(Judged(**one) for one in found) for name, found in data["recipes"].items()}
            chosen = data["default"]
            default = Default(Choice(**chosen["choice"]), chosen["why"])
            find_recipe(default.choice.recipe).ratio_for(default.choice.ratio)
            verdict = cls(data["fingerprint"], judged, data["auxiliary"], default)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, InvalidArgument) as error:
            raise FailedPrecondition(f"can't read {path} ({error}): {again}") from error
        if verdict.fingerprint != fingerprint.hex():
            raise FailedPrecondition(f"{path} is for another model, or this model has changed since: {again}")
        if verdict.auxiliary != auxiliary.hex():
            for name in [n for n, r in RECIPES.items() if r.needs == SecondModel()]:
                verdict.recipes.pop(name, None)
        return verdict

    def unsafe(self, recipe: Recipe, ratio: float) -> str:
        """Why full attention has to replace a recipe; empty if the recipe is allowed.

        At a ratio of 1 without eviction, every recipe is full attention. A recipe is judged by its largest checked
        ratio up to `ratio`. Below its smallest one, it is judged like full_reuse.
        """
        name, judged = self._judged(recipe.name, ratio)
        if judged is None or recipe.lossless or (ratio == 1.0 and recipe.keep is None):
            return ""
        if judged.verdict != UNSAFE and ratio < judged.ratio:
            name, judged = self._judged("full_reuse", ratio)
        if judged is None or judged.verdict != UNSAFE:
            return ""
        judged_as = "" if recipe.name == name else f"recipe {recipe.name!r} at ratio {ratio:g} counts as {name!r}: "
        return f"{judged_as}recipe {name!r} is unsafe on this model by `fusionkv check`: {judged.why}"

    @property
    def judged(self) -> Iterator[tuple[str, Judged]]:
        """Every verdict, with the name of its recipe."""
        return ((name, one) for name, found in self.recipes.items() for one in found)

    def lines(self) -> Iterator[str]:
        for name, judged in self.judged:
            yield f"{name} at ratio {judged.ratio:g}: {judged.verdict}, {judged.why}"
        yield f"default is {self.default}"

    def write(self, path: Path) -> None:
        """Writes the verdicts to a file atomically. Raises OSError."""
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        partial.replace(path)

    def _judged(self, name: str, ratio: float) -> tuple[str, Judged | None]:
        """The longest prefix of a recipe's name that has verdicts, and the one for a ratio."""
        while name not in self.recipes and "+" in name:
            name = name.rpartition("+")[0]
        found = self.recipes.get(name, ())
        return name, next((one for one in reversed(found) if one.ratio <= ratio), found[0] if found else None)


@dataclass(frozen=True, slots=True)
class Allowed:
    """The ratio of a request.

    why: why it was raised; empty if it is the requested one. key, level: the key that the answer is recorded for, and
    its level at the time.
    """

    ratio: float
    why: str
    key: _Key
    level: int


@dataclass(slots=True)
class _Record:
    """The latest answers of a key at its current level, and whether each matched full attention."""

    same: "deque[bool]" = field(default_factory=lambda: deque(maxlen=SAMPLES))
    level: int = 0
    why: str = ""


class Fallback:
    """Raises ratios by recipe and corpus, and never lowers them.

    Only the 1,024 keys whose answers were compared, or ratios raised, last are remembered.
    """

    def __init__(self, floor: float) -> None:
        """floor: minimum share of answers that match full attention; 0 never raises a ratio."""
        self._floor = floor
        self._records: OrderedDict[_Key, _Record] = OrderedDict()

    def ratio(self, recipe: Recipe, corpus: str, requested: float) -> Allowed:
        """The ratio to use for a request that asks for `requested`."""
        key = (recipe.name, corpus, requested < recipe.ratio)
        record = self._records.get(key)
        if record is None or record.level == 0 or recipe.lossless:
            return Allowed(requested, "", key, 0)
        self._records.move_to_end(key)
        if record.level == 1 and not recipe.fixed:
            raised = max(2 * requested, _MIN_RAISED)
            if raised < 1.0:
                return Allowed(raised, record.why, key, record.level)
        return Allowed(1.0, record.why, key, record.level)

    def record(self, allowed: Allowed, same: bool) -> None:
        """Records whether an answer matched full attention; ignored if the ratio has been raised since."""
        record = self._records.setdefault(allowed.key, _Record())
        self._records.move_to_end(allowed.key)
        if len(self._records) > _MAX_KEYS:
            self._records.popitem(last=False)
        if allowed.level != record.level:
            return
        record.same.append(same)
        share = sum(record.same) / SAMPLES
        if len(record.same) == SAMPLES and share < self._floor:
            record.level += 1
            record.why = (
                f"{share:.0%} of {SAMPLES} answers matched full attention, below the floor of {self._floor:.0%}"
            )
            record.same.clear()


@dataclass(frozen=True, slots=True)
class Sample:
    """A greedy answer. logits: float32 [vocabulary], of its first token. allowed: its ratio."""

    prompt: Prompt
    tokens: tuple[int, ...]
    logits: torch.Tensor
    allowed: Allowed


class Shadow:
    """Samples a share of the answers, and repeats them one by one while the worker is idle."""

    def __init__(
        self,
        share: float,
        guard: Fallback,
        pool: KVPool,
        engine: Engine,
        loader: Loader,
        planner: Planner,
        idle: asyncio.Event,
    ) -> None:
        """idle: set while no request runs or waits."""
        self._share = share
        self._guard = guard
        self._pool = pool
        self._engine = engine
        self._loader = loader
        self._planner = planner
        self._waiting: asyncio.Queue[Sample] = asyncio.Queue()
        self.idle = idle
        self._task = asyncio.create_task(self._loop()) if share else None

    def wants(self) -> bool:
        return random.random() < self._share

    def offer(self, sample: Sample) -> None:
        """Queues an answer, or drops it when the queue is full."""
        if self._waiting.qsize() >= _MAX_WAITING:
            _skipped.add(1, {"fusionkv.reason": "queue full"})
        else:
            self._waiting.put_nowait(sample)

    async def settle(self) -> None:
        """Waits until all queued answers are compared or dropped."""
        await self._waiting.join()

    async def close(self) -> None:
        """Drops queued answers and waits until computation has stopped."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _loop(self) -> None:
        while True:
            sample = await self._waiting.get()
            try:
                await self.idle.wait()
                await self._compare(sample)
            except Exception:
                log.exception("an answer could not be repeated with full attention")
                _skipped.add(1, {"fusionkv.reason": "error"})
            finally:
                self._waiting.task_done()

    async def _compare(self, sample: Sample) -> None:
        tokens = sample.prompt.tokens + len(sample.tokens)
        if self._pool.slots_for(tokens) > self._pool.free + self._pool.idle:
            _skipped.add(1, {"fusionkv.reason": "no room"})
            return
        found, kl = list[int](), 0.0
        async with aclosing(self._again(sample)) as blocks:
            async for logits in blocks:
                if not found:
                    kl = await asyncio.to_thread(_divergence, logits[0], sample.logits)
                found += await asyncio.to_thread(_most_likely, logits)
        # Compares with full attention's own answer: both see the same tokens up to the first difference.
        first, same = found[0] == sample.tokens[0], found == list(sample.tokens)
        # Callers choose a recipe's numbers and the names of corpora: neither may become a label.
        attributes = {"fusionkv.recipe": recipe_label(sample.allowed.key[0])}
        _kl.record(kl, attributes)
        _answers.add(1, attributes | {"fusionkv.same_first_token": first, "fusionkv.same_answer": same})
        self._guard.record(sample.allowed, same)

    async def _again(self, sample: Sample) -> AsyncGenerator[torch.Tensor]:
        """Full attention's logits of every token of the answer, float32 [tokens, vocabulary], a block at a time."""
        prompt, answer = sample.prompt, sample.tokens
        # All but the question's last token first: a prefill without logits can be split, and yields to others.
        *question, last = prompt.question
        head = Prompt(prompt.system, prompt.chunks, tuple(question), prompt.tenant)
        async with self._loader.plain(prompt.tokens + len(answer)) as layout:
            plan = self._planner.plain(layout, head)
            if head.tokens:
                await self._engine.run(plan.prefill(Nothing()), background=True)
            rest = [last, *answer[:-1]]
            for start in range(0, len(rest), _BLOCK):
                block = rest[start : start + _BLOCK]
                yield await self._engine.run(plan.next(block, Logits(len(block))), background=True)
                plan = plan.followed_by(block)


def _most_likely(logits: torch.Tensor) -> list[int]:
    """The most likely token of each row."""
    found: list[int] = logits.argmax(-1).tolist()
    return found


def _divergence(full: torch.Tensor, other: torch.Tensor) -> float:
    """The KL divergence of the second of two rows of logits from the first, in nats."""
    log_p, log_q = full.cpu().log_softmax(-1), other.cpu().log_softmax(-1)
    # For equal distributions, rounding may give a negative value, which a histogram drops.
    return max(0.0, float((log_p.exp() * (log_p - log_q)).sum()))
