"""Steps with padded inputs of fixed sizes, as a CUDA graph has them, against steps of which each is launched anew.

Without a GPU, a captured call is called again: it must read nothing but its inputs. With one, it is a graph.
"""

import copy
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from fusionkv.fusion_worker import models
from fusionkv.fusion_worker.compute import batch, step_graphs
from fusionkv.fusion_worker.compute.engine import Engine
from fusionkv.fusion_worker.compute.jobs import AttentionScores, ForwardJob, Logits, NextToken
from fusionkv.fusion_worker.compute.model_runner import forward, install, logits
from fusionkv.fusion_worker.compute.scheduler import QueuedJob, ScheduledSlice
from fusionkv.fusion_worker.compute.step import Step
from fusionkv.fusion_worker.compute.step_graphs import StepGraphs
from fusionkv.fusion_worker.config import WorkerConfig
from fusionkv.fusion_worker.decode.sampling import Sampler, SamplingParams, best, best_of
from fusionkv.fusion_worker.pool.kv_pool import KVPool
from fusionkv.fusion_worker.pool.slots import SlotRange
from fusionkv.kernels.segments import KVSegment
from tests.fusion_worker.oracle import byte_tokenizer, network
from tests.kernels.inputs import DEVICE, HAS_KERNEL

GREEDY = NextToken(Sampler(SamplingParams(8)))
SLOTS = 400
Outputs = tuple[torch.Tensor, ...]


class Again:
    """In place of a graph: calls again what it captured."""

    def __init__(self, run: Callable[[], Outputs], outputs: Outputs) -> None:
        self._run, self._outputs = run, outputs

    def replay(self) -> None:
        for old, new in zip(self._outputs, self._run(), strict=True):
            old.copy_(new)


def capture(run: Callable[[], Outputs]) -> tuple[Again, Outputs]:
    outputs = tuple(each.clone() for each in run())
    return Again(run, outputs), outputs


def job(length: int, chunks: int, slot: int, token: int, output: Any = GREEDY) -> ForwardJob[Any]:
    """A row after chunks with a recomputed token each, which were encoded for other positions."""
    each = length // chunks
    hidden = torch.arange(each) == 1
    keys = [KVSegment(i * each, each, i * each, shift=7 * i, hidden=hidden) for i in range(chunks)]
    fresh = torch.arange(chunks) * each + 1
    position = torch.tensor([each * chunks])
    keys.append(KVSegment(slot, chunks, 1, positions=fresh))
    return ForwardJob(torch.tensor([token]), position, [SlotRange(slot + chunks, 4)], tuple(keys), output)


def step(model: models.Model, pool: KVPool, *jobs: ForwardJob[Any]) -> Step:
    return Step.of([ScheduledSlice(QueuedJob(each), 0, each.rows) for each in jobs], model, pool.kv)


def three(length: int, chunks: int, count: int) -> list[ForwardJob[Any]]:
    return [job(length + 3 * i, chunks, 250 + 30 * i, 5 + i) for i in range(count)]


def question(length: int, chunks: int, rows: int, first: int = 1) -> ForwardJob[Any]:
    """A question's rows after chunks that were encoded for other positions; layers are scored from `first` on."""
    each = length // chunks
    keys = tuple(KVSegment(i * each, each, i * each, shift=7 * i) for i in range(chunks))
    positions = torch.arange(each * chunks, each * chunks + rows)
    output = AttentionScores(frozenset(range(first, 3)))
    return ForwardJob(torch.arange(rows) + 5, positions, [SlotRange(300, 90)], keys, output)


def interpret(graphs: StepGraphs, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, has Triton's interpreter in place of a GPU."""
    from fusionkv.kernels.gpu import sparse_attention_triton

    if DEVICE.type == "cpu":
        graphs.works, graphs._capture = True, capture
        monkeypatch.setattr(batch, "sparse_attention", sparse_attention_triton.sparse_attention)


def made(family: str) -> tuple[models.Model, KVPool, StepGraphs]:
    model = models.wrap(family, copy.deepcopy(network(family)).to(DEVICE), byte_tokenizer(), bytes(32), 2048)
    install(model)
    pool = KVPool.of(model.kv, SLOTS * model.kv.token_bytes, 4, DEVICE)
    torch.manual_seed(0)
    pool.kv.copy_(torch.randn(pool.kv.shape))
    return model, pool, StepGraphs(model, pool)


@pytest.mark.skipif(not HAS_KERNEL, reason="needs a GPU, or TRITON_INTERPRET=1 as test_interpreter.py sets it")
class TestGraphs:
    @pytest.mark.parametrize("kind", ["llama", "gemma3"])
    def test_padded_steps_equal_others(self, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
        model, pool, graphs = made(kind)
        interpret(graphs, monkeypatch)
        before = pool.kv.clone()
        # The same sizes with other numbers of rows, chunks and keys; then larger ones.
        for length, chunks, count in ((60, 3, 3), (90, 5, 4), (41, 2, 3), (60, 3, 1)):
            jobs = three(length, chunks, count)
            pool.kv.copy_(before)
            expected = logits(model, forward(model, step(model, pool, *jobs).batch))
            written = pool.kv[:, :, : pool.capacity].clone()
            pool.kv.copy_(before)
            found = graphs.predict(step(model, pool, *jobs))
            assert found is not None
            torch.testing.assert_close(found.logits, expected, atol=2e-4, rtol=2e-4)
            assert [each.token for each in best_of(found.figures)] == [each.token for each in best(expected)]
            torch.testing.assert_close(pool.kv[:, :, : pool.capacity], written, atol=2e-4, rtol=2e-4)
            assert torch.isfinite(pool.kv).all()
        assert len(graphs._captured) == 2

    @pytest.mark.parametrize("kind", ["llama", "gemma3"])
    def test_padded_scores_equal_others(self, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
        model, pool, graphs = made(kind)
        interpret(graphs, monkeypatch)
        before = pool.kv.clone()
        # The same sizes with other numbers of rows, chunks and keys; more rows; other layers.
        for given in ((60, 3, 5), (90, 5, 16), (60, 3, 40), (60, 3, 5, 2)):
            computed, captured = (step(model, pool, question(*given)) for _ in range(2))
            assert graphs.chooses(captured)
            pool.kv.copy_(before)
            forward(model, computed.batch)
            written = pool.kv[:, :, : pool.capacity].clone()
            pool.kv.copy_(before)
            assert graphs.score(captured)
            expected = computed.probes[0].scores
            assert float(expected.sum()) > 1
            torch.testing.assert_close(captured.probes[0].scores, expected, atol=2e-4, rtol=2e-4)
            torch.testing.assert_close(pool.kv[:, :, : pool.capacity], written, atol=2e-4, rtol=2e-4)
            assert torch.isfinite(pool.kv).all()
        assert len(graphs._captured) == 3


def test_which_steps() -> None:
    """Those of which no more is wanted than tokens; and none on a CPU."""
    model, pool, graphs = made("llama")
    jobs = three(60, 3, 2)
    assert graphs.decodes(step(model, pool, *jobs)) == (DEVICE.type == "cuda")
    graphs.works = True
    assert graphs.decodes(step(model, pool, *jobs))
    assert graphs.decodes(step(model, pool, *jobs * 16))
    assert not graphs.decodes(step(model, pool, *jobs * 17))
    sampler = GREEDY.sampler
    for other in (NextToken(sampler, logits=True), NextToken(sampler, votes=1), Logits(1)):
        assert not graphs.decodes(step(model, pool, jobs[0], replace(jobs[1], output=other)))
    long = replace(jobs[1], ids=torch.tensor([1, 2]), positions=torch.tensor([60, 61]))
    assert not graphs.decodes(step(model, pool, jobs[0], long))


def test_which_steps_choose() -> None:
    model, pool, graphs = made("llama")
    chooses = step(model, pool, question(60, 3, 5))
    assert graphs.chooses(chooses) == (DEVICE.type == "cuda")
    graphs.works = True
    assert graphs.chooses(chooses)
    assert not graphs.decodes(chooses)
    assert not graphs.chooses(step(model, pool, question(60, 3, 5), question(60, 3, 5)))
    assert not graphs.chooses(step(model, pool, *three(60, 3, 1)))
    many = replace(question(60, 3, 129), slots=[SlotRange(200, 200)])
    assert not graphs.chooses(step(model, pool, many))
    far = replace(question(60, 3, 5), positions=torch.arange(5) + 32764)
    assert not graphs.chooses(step(model, pool, far))


class OutOfResources(Exception):
    """As Triton's, which is no RuntimeError."""


@pytest.mark.parametrize("error", [RuntimeError, OutOfResources, torch.OutOfMemoryError])
def test_what_cannot_be_captured(
    error: type[Exception], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is launched as other steps; where memory was short, it is tried again."""
    model, pool, graphs = made("llama")
    graphs.works = True

    def fails(_: object) -> Any:
        raise error("operation not permitted when stream is capturing\nmore")

    graphs.compute = graphs.attention = fails  # type: ignore[method-assign]
    chooses, decodes = step(model, pool, question(60, 3, 5)), step(model, pool, *three(60, 3, 1))
    assert not graphs.score(chooses)
    assert "of choosing are not captured as CUDA graphs: operation not permitted when stream is" in caplog.text
    assert (graphs.chooses(chooses), graphs.decodes(decodes)) == (False, True)
    assert graphs.predict(decodes) is None
    assert not graphs.decodes(decodes)
    later = time.monotonic() + 61
    monkeypatch.setattr(step_graphs.time, "monotonic", lambda: later)
    assert graphs.chooses(chooses) == graphs.decodes(decodes) == (error is torch.OutOfMemoryError)


@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")
def test_what_a_failed_capture_leaves_behind() -> None:
    numbers, stream = torch.ones(4, device=DEVICE), torch.cuda.current_stream()
    with pytest.raises(RuntimeError):
        step_graphs._capture(lambda: (numbers * numbers.sum().item(),))
    assert torch.cuda.current_stream() == stream
    graph, (out,) = step_graphs._capture(lambda: (numbers + 1,))
    graph.replay()
    assert out.tolist() == [2.0] * 4


def test_the_graph_that_was_used_last_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(step_graphs, "_MOST_GRAPHS", 2)
    model, pool, graphs = made("llama")
    nothing = Again(lambda: (), ())
    captures = 0

    def counted(_: object) -> tuple[Again, Outputs]:
        nonlocal captures
        captures += 1
        return nothing, (torch.zeros(1024),)

    graphs._capture = counted
    for rows, expected in ((5, 1), (20, 2), (9, 2), (40, 3), (5, 3), (20, 4)):
        graphs.attention(step(model, pool, question(60, 3, rows)).batch)
        assert captures == expected


@pytest.mark.parametrize("captures", [True, False])
async def test_an_engine_takes_the_scores_of_a_graph(captures: bool) -> None:
    """Unless its steps are turns between those of vLLM, which a capture would keep waiting."""
    model, pool, _ = made("llama")
    engine = Engine(model, pool, WorkerConfig())
    try:
        engine._graphs.works, engine.tp.captures = True, captures
        engine._graphs.attention = lambda _: torch.full((65,), 7.0)  # type: ignore[method-assign]
        found = await engine.run(question(60, 3, 5))
    finally:
        engine.close()
    assert len(found) == 65
    assert bool((found == 7).all()) == captures
