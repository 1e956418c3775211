"""Two ranks, real processes over gloo, answer as one does: against an untouched model and against a worker alone."""

import asyncio
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Coroutine, Iterator
from contextlib import AsyncExitStack, aclosing, suppress
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
import torch
import torch.distributed as dist
from grpc_health.v1 import health_pb2, health_pb2_grpc

from fusionkv.fusion_worker import models
from fusionkv.fusion_worker.compute.engine import TPGroup
from fusionkv.fusion_worker.config import WorkerConfig
from fusionkv.fusion_worker.tensor_parallel.start import Processes, started
from fusionkv.protos.fusion.v1 import fusion_pb2 as pb
from fusionkv.protos.runtime import rpc
from fusionkv.protos.runtime.errors import FailedPrecondition, Unavailable
from tests.fusion_worker.oracle import CLOSE, error, oracle, random_ids, saved, whole

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(torch.cuda.is_available(), reason="ranks on a CPU need GPUs hidden: CUDA_VISIBLE_DEVICES="),
]
# By 1e-4 of the largest logit: sums over heads and channels are made in another order, and no more than that.
POOL = {"pool_bytes": 8 << 20, "page_tokens": 4}
# Gate and up in one matrix; experts; norms of heads; biases of q, k and v.
# The tests after those of all recipes take the last one's ranks over.
SHARED = ("glm4", "qwen3-moe", "qwen3", "qwen2")
RECIPES = {
    **{name: {"ratio": 0.4} for name in ("prophetkv", "fusionrag", "epic", "cacheblend", "kvshare", "cache_craft")},
    **{name: {"ratio": 0.4} for name in ("a3", "a3+snapkv(12)")},
    **{name: {} for name in ("full_attention", "full_reuse", "ape", "full_reuse+snapkv(12)")},
}


@dataclasses.dataclass
class Pair:
    """Two ranks, this process and a child, and the directory of their model."""

    directory: Path
    others: Processes
    model: models.Model
    tp: TPGroup


class Pairs:
    """One pair at a time, since torch.distributed has one default group in a process; in a loop beside the tests'."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._held = AsyncExitStack()
        self._now: tuple[str, float] | None = None
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def get(self, family: str, rank_timeout: float = 60.0) -> Pair:
        """The pair that the test before had, if it is of this kind."""
        if self._now != (family, rank_timeout):
            self.close()
            self.pair = self.run(self._start(family, rank_timeout))
            self._now = family, rank_timeout
        return self.pair

    def close(self) -> None:
        self._now = None
        self.run(self._held.aclose())

    async def _start(self, family: str, rank_timeout: float) -> Pair:
        folder = saved(self._folder / family, family)
        settings = {"model": folder, "device": "cpu", "tensor_parallel": 2, "rank_timeout": rank_timeout, **POOL}
        flags = [f"--{key.replace('_', '-')}={value}" for key, value in settings.items()]
        others = await self._held.enter_async_context(started(2, flags))
        model, tp = await others.lead(WorkerConfig(**settings))  # type: ignore[arg-type]
        self._held.callback(dist.destroy_process_group)
        return Pair(folder, others, model, tp)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pairs]:
    made = Pairs(tmp_path_factory.mktemp("ranks"))
    yield made
    made.close()


async def together(pair: Pair, start: Any, **more: Any) -> Any:
    """A worker over both ranks."""
    family, tp = pair.model.family.removesuffix("_text").replace("_", "-"), pair.tp
    return await start(family, replace=lambda _: pair.model, tp=tp, **POOL, **more)


def alike(found: Any, expected: Any) -> None:
    assert found.ids == expected.ids
    assert all(error(a, b) < CLOSE for a, b in zip(found.logits, expected.logits, strict=True))


def alone_of(ranks: Pair) -> Any:
    """The same model in one process."""
    return lambda _: models.load(ranks.directory, "cpu")


@pytest.mark.slow
@pytest.mark.parametrize("name", SHARED)
async def test_every_recipe_answers_as_alone(name: str, pairs: Pairs, start: Any, parts: Any) -> None:
    """The same tokens, and logits within 1e-4 of the largest; the two ends as an untouched model has them."""
    pair, plain = await together(pairs.get(name), start), oracle(name)
    alone = await start(name)
    for recipe, more in RECIPES.items():
        found, expected = [await each.ask(*parts, recipe=recipe, max_tokens=6, **more) for each in (pair, alone)]
        alike(found, expected)
        assert found.summary.tokens_recomputed == expected.summary.tokens_recomputed, recipe
    for ratio, expected in ((1.0, plain.full_attention(parts)), (0.0, plain.full_reuse(parts))):
        await pair.ask(*parts, recipe="prophetkv", ratio=ratio, expected=expected)


@pytest.mark.slow
@pytest.mark.parametrize(("store", "signed"), [("plain", False), ("int8", False), ("int4", False), ("plain", True)])
async def test_entries_are_those_of_a_worker_alone(
    store: str, signed: bool, cache_service: str, pairs: Pairs, start: Any, parts: Any, key_file: Path
) -> None:
    """What one of them encodes the other fetches, and both answer the same; also where both sign."""
    system, chunks, question = parts
    more = {"cache": cache_service, "store": store, "signing_keys": key_file if signed else None}
    ranks = pairs.get("qwen2")
    pair = await together(ranks, start, **more)
    first, second = [await start("qwen2", replace=alone_of(ranks), **more) for _ in range(2)]
    ours, theirs = chunks[:2], chunks[2:]

    expected = await first.fill(system, theirs, question, recipe="full_reuse", max_tokens=4)
    found = await pair.ask(system, theirs, question, recipe="full_reuse", max_tokens=4)
    assert sum(h.chunks for h in found.summary.hits if h.tier == "memory") == len(theirs)
    assert found.summary.bytes_fetched > 0
    # In one byte a number, what was fetched is not what its encoder had in its pool.
    if store == "plain":
        alike(found, expected)

    made = await pair.fill(system, ours, question, recipe="prophetkv", max_tokens=4)
    assert made.summary.chunks_missed == len(ours)
    for recipe in ("full_reuse", "prophetkv"):
        expected = await second.ask(*parts, recipe=recipe, max_tokens=4)
        pair.pool.clear()
        found = await pair.ask(*parts, recipe=recipe, max_tokens=4)
        assert expected.summary.chunks_missed == found.summary.chunks_missed == 0
        alike(found, expected)


@pytest.mark.slow
async def test_a_prompt_is_handed_over_with_the_heads_of_both(pairs: Pairs, start: Any, parts: Any) -> None:
    ranks = pairs.get("qwen2")
    found = []
    for rig in (await together(ranks, start), await start("qwen2", replace=alone_of(ranks))):
        await rig.ask(*parts)
        request = pb.PrefillRequest(prompt=rig.request(*parts, max_tokens=8))
        async with aclosing(rig.servicer.Prefill(request, None)) as events:
            _, kv = await anext(events), (await anext(events)).kv
            data = await rig.servicer.answerer.handover.read(kv.handle, 0, 1)
            shape = kv.layers, 2, kv.tokens, kv.kv_heads, kv.head_dim
            found.append(torch.frombuffer(bytearray(data), dtype=torch.float32).view(shape))
    assert error(*found) < CLOSE


@pytest.mark.slow
async def test_requests_share_steps(pairs: Pairs, start: Any, parts: Any) -> None:
    """Prefills that are split, answers that are decoded and chunks that are encoded, all at once."""
    pair = await together(pairs.get("qwen2"), start, max_step_tokens=24, max_mixed_tokens=16)
    plain = oracle("qwen2")
    system, chunks, _ = parts
    questions = [random_ids(3 + n, 200 + n) for n in range(8)]
    kinds = ("full_reuse", plain.reused(system, chunks)), ("full_attention", plain.kv(whole((system, chunks, []))))
    asked = []
    for question, (recipe, context) in zip(questions, 4 * kinds, strict=True):
        more = {"max_tokens": 4, "expected": plain.after(context, question)}
        asked.append(pair.ask(system, chunks, question, recipe=recipe, **more))
    await asyncio.gather(*asked)


@pytest.mark.long
@pytest.mark.slow
async def test_a_rank_that_hangs_is_not_waited_for(pairs: Pairs, start: Any, parts: Any) -> None:
    """What is asked is refused, at once from then on, and the worker is told that it can't go on."""
    ranks = pairs.get("llama", rank_timeout=10.0)
    pair = await together(ranks, start)
    await pair.ask(*parts, recipe="full_reuse")
    (child,) = ranks.others.children
    child.send_signal(signal.SIGSTOP)
    for _ in range(2):
        with pytest.raises(Unavailable, match="the 2 ranks of this worker are out of sync"):
            await asyncio.wait_for(pair.ask(*parts, recipe="full_attention"), 120)
    with pytest.raises(Unavailable, match="out of sync"):
        await asyncio.to_thread(pairs.run, asyncio.wait_for(asyncio.shield(ranks.others.lost), 120))


def start_two(launch: Any, model: Path) -> tuple[Any, psutil.Process]:
    """A worker of two ranks by its command line, and the second's process."""
    flags = ("--model", str(model), "--device", "cpu", "--tensor-parallel", "2", "--listen", "127.0.0.1:0")
    service = launch("fusionkv.fusion_worker", *flags)
    (child,) = psutil.Process(service.process.pid).children()
    return service, child


async def test_one_rank_has_no_folder_that_a_signal_would_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    async with started(1, []):
        assert not os.listdir(tmp_path)


@pytest.mark.long
@pytest.mark.slow
async def test_a_rank_that_is_killed_ends_the_worker(launch: Any, reference_model: Path) -> None:
    service, child = start_two(launch, reference_model)
    async with rpc.dial(service.address) as channel:
        seen = []
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        with suppress(grpc.RpcError):
            async for reply in watch:
                if not seen:
                    child.kill()
                seen.append(reply.status)
        assert seen[0] == health_pb2.HealthCheckResponse.SERVING
        assert all(status == health_pb2.HealthCheckResponse.NOT_SERVING for status in seen[1:])
    assert service.wait() == 1
    assert "fusionkv-worker: rank 1 of 2 was killed by SIGKILL" in service.log


@pytest.mark.long
@pytest.mark.slow
def test_ranks_end_with_their_worker(launch: Any, reference_model: Path) -> None:
    service, child = start_two(launch, reference_model)
    assert service.stop() == 0, service.log
    assert not child.is_running()


async def test_a_gpu_that_fails_for_good_ends_the_worker(start: Any) -> None:
    """Here, where there is none, all its calls fail."""
    told = list[Unavailable]()
    (await start("llama", tp=TPGroup(told.append))).servicer.engine._check_device()
    assert "the GPU answers no more calls" in str(told)


def test_a_rank_without_its_worker_ends_at_once() -> None:
    rank = ("--rank", "1", "--meeting", "/nowhere", "--pipes", "3", "4", "--parent", "0")
    command = (sys.executable, "-P", "-m", "fusionkv.fusion_worker", *rank)
    assert subprocess.run(command, check=False, timeout=60).returncode == 0


@pytest.mark.parametrize(
    ("kind", "change", "count", "why"),
    [
        ("qwen2", {}, 3, "4 KV heads, .* evenly over 3 ranks: set tensor_parallel to a divisor of 4"),
        ("qwen2", {}, 8, "4 KV heads, which can't be split evenly over 8 ranks"),
        ("qwen3-moe", {"moe_intermediate_size": 47}, 2, "47 channels of an expert, which can't be split evenly"),
        ("phi3", {}, 2, "phi3 can't be split over ranks: .* computes all attention heads"),
        ("deepseek-v2", {}, 2, "deepseek-v2 can't be split over ranks: .* share a token's latent"),
    ],
)
def test_what_can_not_be_shared(kind: str, change: dict[str, Any], count: int, why: str, tmp_path: Path) -> None:
    file = saved(tmp_path / kind, kind) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(FailedPrecondition, match=why):
        models.check_shareable(file.parent, count)


def test_a_family_without_a_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.Qwen2Config.base_model_tp_plan", None)
    with pytest.raises(FailedPrecondition, match="qwen2 can't be split over ranks: transformers has no tp_plan"):
        models.check_shareable(saved(tmp_path / "qwen2", "qwen2"), 2)
