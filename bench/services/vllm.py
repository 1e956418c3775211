"""Time to first token with real passages: vLLM alone, with FusionKV in two ways, and FusionKV alone.

Each prompt has a question and eight passages. It is asked once (cold), again (same order), with its passages in
another order, and with half of them replaced by passages of earlier prompts (other neighbours). All systems get the
same token ids, and run one after another on one machine, each with its own servers. Agreement is the share of an
answer's tokens that equal those of full attention at the same index, as computed by the fusion worker.

On a machine with a GPU, all systems use it, and vLLM its CUDA graphs; that has not run yet.
"""

import asyncio
import contextlib
import itertools
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, aclosing, contextmanager
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import aiohttp
from rich.progress import Progress

from fusionkv.bench import command
from fusionkv.bench.services.process import Process, free_port
from fusionkv.bench.worker.passages import questions
from fusionkv.fusion_worker.client import WorkerClient
from fusionkv.fusion_worker.evaluate.command import run as run_command
from fusionkv.fusion_worker.library.resolve import resolve
from fusionkv.gateway.client.client import AsyncClient
from fusionkv.gateway.client.results import Passage
from fusionkv.gateway.tokens import Vocabulary
from fusionkv.protos.answer.v1.answer_pb2 import Token

ROOT = Path(__file__).parent.parent.parent
VLLM = ROOT / "build/vllm/bin/python"
CASES = ("cold", "same order", "other order", "other neighbours")
_ANSWER = 16
_START_SECONDS, _ANSWER_SECONDS = 300.0, 120.0
_PASSAGE_TOKENS = 512  # at most, with its share of the question and of the answer
_POOL_BYTES = 1 << 29
# On a GPU, which a worker and vLLM share: bytes of a worker's pool, and vLLM's share of the memory.
_GPU_POOL_BYTES, _GPU_SHARE = 8 << 30, 0.5


@dataclass(frozen=True, slots=True)
class Prompt:
    question: str
    passages: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Asked:
    """An answer: its token ids, and the seconds to the first one."""

    ids: list[int]
    ttft: float


Ask = Callable[[Prompt], Awaitable[Asked]]


@dataclass(frozen=True, slots=True)
class Row:
    """A system's results for the prompts of a case. agreement: with full attention, 0 to 1."""

    system: str
    case: str
    ttft_median_s: float
    ttft_s: list[float]
    agreement: float
    prompts: int


@cache
def on_gpu() -> bool:
    """Whether vLLM's Python finds a GPU."""
    code = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    return not subprocess.run([str(VLLM), "-P", "-c", code], check=False).returncode


def prompts(asked: Iterable[tuple[str, Sequence[str]]], count: int, passages: int = 8) -> Iterator[dict[str, Prompt]]:
    """Yields each question's prompts by case. Passages of its cold prompt are in no earlier prompt."""
    chance, earlier = random.Random(1), list[str]()
    for question, texts in asked:
        own = [text for text in dict.fromkeys(texts) if text not in earlier][:passages]
        if len(own) < passages or count == 0:
            continue
        moved = own[:]
        while moved == own:
            chance.shuffle(moved)
        half = passages // 2
        if earlier:
            count -= 1
            mixed = [*chance.sample(earlier, half), *chance.sample(own, passages - half)]
            chance.shuffle(mixed)
            made = (own, own, moved, mixed)
            yield {case: Prompt(question, tuple(p)) for case, p in zip(CASES, made, strict=True)}
        else:  # the first prompt is a warm-up
            yield {"cold": Prompt(question, tuple(own))}
        earlier += own


@contextlib.asynccontextmanager
async def over_http(url: str, vocabulary: Vocabulary, fused: bool = False) -> AsyncIterator[Ask]:
    """Yields a function that asks a vLLM server. fused: whether it is told where the passages are."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(_ANSWER_SECONDS)) as session:

        async def ask(prompt: Prompt) -> Asked:
            system, chunks = vocabulary.system(), [vocabulary.chunk(passage) for passage in prompt.passages]
            ids = [*system, *(i for chunk in chunks for i in chunk), *vocabulary.question(prompt.question)]
            more: dict[str, Any] = {}
            if fused:
                ends = list(itertools.accumulate(map(len, chunks), initial=len(system)))
                asked = {"spans": list(itertools.pairwise(ends)), "corpus": "bench"}
                more = {"cache_salt": "fused", "kv_transfer_params": {"fusionkv": asked}}
            return await complete(session, url, ids, _ANSWER, **more)

        yield ask


async def complete(
    session: aiohttp.ClientSession, url: str, ids: Sequence[int], max_tokens: int, **more: Any
) -> Asked:
    """Lets a vLLM server continue a prompt of token ids, greedily. more: fields of the request."""
    more |= {"max_tokens": max_tokens, "temperature": 0, "stream": True, "return_token_ids": True}
    found, first, began = list[int](), 0.0, time.perf_counter()
    async with session.post(f"{url}/v1/completions", json={"prompt": ids, **more}) as response:
        response.raise_for_status()
        async for line in response.content:
            if line.startswith(b"data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    first = first or time.perf_counter() - began
                    found += choice["token_ids"]
    return Asked(found, first)


@contextlib.asynccontextmanager
async def over_gateway(address: str, recipe: str) -> AsyncIterator[Ask]:
    """Yields a function that asks a gateway."""
    client = AsyncClient(address)

    async def ask(prompt: Prompt) -> Asked:
        found, first, began = list[int](), 0.0, time.perf_counter()
        passages = [Passage(text=text) for text in prompt.passages]
        asking = client.stream(
            "", prompt.question, passages=passages, order="rank", recipe=recipe, max_tokens=_ANSWER
        )
        async with aclosing(asking) as events:
            async for event in events:
                if isinstance(event, Token):
                    first = first or time.perf_counter() - began
                    found.append(event.id)
                elif getattr(event, "degraded", False):
                    print(f"degraded: {event.degraded_reason}", file=sys.stderr)  # type: ignore[union-attr]
        return Asked(found, first)

    try:
        yield ask
    finally:
        await client.close()


class Servers:
    """Starts the servers of a system, which are stopped with the context."""

    def __init__(self, stack: ExitStack, folder: Path, model: Path, max_tokens: int) -> None:
        self._stack, self.folder, self._model, self._max_tokens = stack, folder, model, max_tokens

    def start(self, *command: str, **env: str) -> Process:
        process = Process(self.folder, *command, env=env)
        self._stack.callback(process.stop)
        return process

    def ours(self, name: str, *flags: str) -> str:
        """Starts a FusionKV service; returns its address."""
        here = f"unix:{self.folder}/{name.rpartition('.')[2]}.sock"
        process = self.start(sys.executable, "-P", "-m", f"fusionkv.{name}", "--listen", here, *flags)
        return process.addresses[0]

    def worker(self) -> tuple[str, str]:
        """Starts a worker and its cache service; returns their addresses."""
        cache = self.ours("kvcache_service", "--data-dir", str(self.folder / "kvcache"))
        pool = ("--pool-bytes", str(_GPU_POOL_BYTES)) if on_gpu() else ()
        return self.ours("fusion_worker", "--model", str(self._model), "--cache", cache, *pool), cache

    def gateway(self, worker: str, *flags: str) -> str:
        folder = str(self.folder / "gateway")
        return self.ours("gateway", "--workers", worker, "--data-dir", folder, "--embedder", "none", *flags)

    def vllm(self, connector: dict[str, Any] | None, *flags: str) -> str:
        """Starts a vLLM server; returns its URL."""
        port = free_port()
        more = ["--kv-transfer-config", json.dumps({"kv_role": "kv_both", **connector})] if connector else []
        own = (
            *("--model", str(self._model), "--port", str(port), "--host", "127.0.0.1"),
            *("--max-model-len", str(self._max_tokens), "--max-num-batched-tokens", str(self._max_tokens)),
            *("--max-num-seqs", "16", "--enable-prompt-tokens-details", *more),
            *(("--gpu-memory-utilization", str(_GPU_SHARE)) if on_gpu() else ("--enforce-eager",)),
        )
        env = {"VLLM_CPU_KVCACHE_SPACE": "3", "VLLM_LOGGING_LEVEL": "WARNING", "HF_HUB_OFFLINE": "1"}
        command = (str(VLLM), "-P", "-m", "vllm.entrypoints.openai.api_server", *own, *flags)
        self.start(*command, **env).listens(port, _START_SECONDS)
        return f"http://127.0.0.1:{port}"

    def fusionkv(self, cache: str, pool_bytes: int = 0, **more: Any) -> dict[str, Any]:
        """The configuration of FusionKV's connector.

        pool_bytes: of its pool for fused prefill; 0 for none. more: further options.
        """
        return {
            "kv_connector": "FusionKVConnector",
            "kv_connector_module_path": "fusionkv.vllm_connector.connector",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"cache": cache, "pool_bytes": pool_bytes, **more},
        }


@contextmanager
def servers(model: Path, max_tokens: int = 4096) -> Iterator[Servers]:
    """Yields servers that use a temporary folder. max_tokens: of a prompt and its answer in vLLM."""
    with tempfile.TemporaryDirectory(prefix="fusionkv-vllm") as folder, ExitStack() as stack:
        yield Servers(stack, Path(folder), model, max_tokens)


async def vocabulary_of(worker: str) -> Vocabulary:
    client = WorkerClient(worker)
    try:
        return Vocabulary(await client.model())
    finally:
        await client.close()


class Bench:
    """Asks all systems the same prompts, one system after another."""

    def __init__(self, model: Path, asked: Sequence[dict[str, Prompt]], max_tokens: int, progress: Progress) -> None:
        self._servers = partial(servers, model, max_tokens)
        self._asked, self._progress = asked, progress
        self._right: dict[Prompt, list[int]] = {}
        self._vocabulary: Any = None
        self.rows: list[Row] = []

    async def run(self) -> None:
        with self._servers() as s:
            worker, _ = s.worker()
            self._vocabulary = await vocabulary_of(worker)
            gateway = s.gateway(worker)
            async with over_gateway(gateway, "full_attention") as ask:
                await self._reference(ask)
            async with over_gateway(gateway, "default") as ask:
                await self._measure("fusionkv", ask)
        with self._servers() as s:
            worker, cache = s.worker()
            url = s.vllm(s.fusionkv(cache))
            async with over_gateway(s.gateway(worker, "--decode", "vllm", "--vllm-url", url), "default") as ask:
                await self._measure("fusionkv in vllm", ask)
        with self._servers() as s:
            cache = s.ours("kvcache_service", "--data-dir", str(s.folder / "kvcache"))
            url = s.vllm(s.fusionkv(cache, _GPU_POOL_BYTES if on_gpu() else _POOL_BYTES))
            async with over_http(url, self._vocabulary, fused=True) as ask:
                await self._measure("fusionkv inside vllm", ask)
        with self._servers() as s:
            async with over_http(s.vllm(None), self._vocabulary) as ask:
                await self._measure("vllm prefix cache", ask)

    async def _reference(self, ask: Ask) -> None:
        different = list(dict.fromkeys(prompt for cases in self._asked for prompt in cases.values()))
        for prompt in self._progress.track(different, description="full attention"):
            self._right[prompt] = (await ask(prompt)).ids

    async def _measure(self, system: str, ask: Ask) -> None:
        took: dict[str, list[float]] = {case: [] for case in CASES}
        agreed: dict[str, list[float]] = {case: [] for case in CASES}
        for cases in self._progress.track(self._asked, description=system):
            for case, prompt in cases.items():
                answer = await ask(prompt)
                if len(cases) == 1:
                    continue
                right = self._right[prompt]
                took[case].append(answer.ttft)
                same = sum(a == b for a, b in zip(answer.ids, right, strict=False))
                agreed[case].append(same / max(len(answer.ids), len(right)))
        for case in CASES:
            seconds = [round(s, 4) for s in took[case]]
            agreement = round(statistics.mean(agreed[case]), 3)
            median = round(statistics.median(seconds), 4)
            self.rows.append(Row(system, case, median, seconds, agreement, len(seconds)))


def lines(rows: Sequence[Row]) -> Iterator[list[str]]:
    """Yields medians, the speed-up over vLLM's prefix cache, and agreement of each system."""
    there = {(row.system, row.case): row for row in rows}
    for system in dict.fromkeys(row.system for row in rows):
        cells = []
        for case in CASES:
            row, peer = there[system, case], there.get(("vllm prefix cache", case))
            times = f"  {peer.ttft_median_s / row.ttft_median_s:.1f}x" if peer else ""
            cells.append(f"{row.ttft_median_s:.2f}{times}  {row.agreement:.0%}")
        yield [system, *cells]


def main() -> None:
    parser = command.parser_of("services.vllm", __doc__)
    command.add_model(parser)
    command.add_data(parser)
    parser.add_argument("--prompts", type=int, default=10, help="prompts of each case (default: %(default)s)")
    parser.add_argument("--passages", type=int, default=8, help="passages of a prompt (default: %(default)s)")
    options = parser.parse_args()
    if not VLLM.exists():
        raise OSError(f"{VLLM} does not exist: make vllm installs it")
    count = options.passages
    asked = list(prompts(questions(options.data, count), options.prompts, count))
    if len(asked) < 2:
        raise ValueError(f"fewer than two questions with {count} passages that no other question has")
    with Progress(transient=True) as progress:
        bench = Bench(resolve(options.model), asked, max(4096, _PASSAGE_TOKENS * count), progress)
        asyncio.run(bench.run())
    title = "seconds to the first token (median), times vLLM's prefix cache, agreement"
    command.show(command.table(title, ("system", *CASES), lines(bench.rows), texts=1 + len(CASES)))
    about = {"machine": command.machine(), "model": options.model}
    command.write([about | asdict(row) for row in bench.rows], options.json)


if __name__ == "__main__":
    sys.exit(run_command("vllm", main))
