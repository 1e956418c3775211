"""Decoding with padded inputs of fixed sizes, as a CUDA graph has them, against steps of which each is launched anew.

Without a GPU, a captured call is called again: it must read nothing but its inputs. With one, it is a graph.
"""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from fusionkv.fusion_worker import models
from fusionkv.fusion_worker.compute import batch
from fusionkv.fusion_worker.compute.decode_graphs import DecodeGraphs, Predicted
from fusionkv.fusion_worker.compute.jobs import ForwardJob, Logits, NextToken
from fusionkv.fusion_worker.compute.model_runner import forward, install, logits
from fusionkv.fusion_worker.compute.scheduler import QueuedJob, ScheduledSlice
from fusionkv.fusion_worker.compute.step import Step
from fusionkv.fusion_worker.decode.sampling import Sampler, SamplingParams, best, best_of
from fusionkv.fusion_worker.pool.kv_pool import KVPool
from fusionkv.fusion_worker.pool.slots import SlotRange
from fusionkv.kernels.segments import KVSegment
from tests.fusion_worker.oracle import byte_tokenizer, network
from tests.kernels.inputs import DEVICE, HAS_KERNEL, interpreted

GREEDY = NextToken(Sampler(SamplingParams(8)))
SLOTS = 400


class Again:
    """In place of a graph: calls again what it captured."""

    def __init__(self, run: Callable[[], Predicted], outputs: Predicted) -> None:
        self._run, self._outputs = run, outputs

    def replay(self) -> None:
        for old, new in zip(self._outputs, self._run(), strict=True):
            old.copy_(new)


def capture(run: Callable[[], Predicted]) -> tuple[Again, Predicted]:
    outputs = Predicted(*(each.clone() for each in run()))
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


def made(family: str) -> tuple[models.Model, KVPool, DecodeGraphs]:
    model = models.wrap(family, copy.deepcopy(network(family)).to(DEVICE), byte_tokenizer(), bytes(32), 2048)
    install(model)
    pool = KVPool.of(model.kv, SLOTS * model.kv.token_bytes, 4, DEVICE)
    torch.manual_seed(0)
    pool.kv.copy_(torch.randn(pool.kv.shape))
    return model, pool, DecodeGraphs(model, pool)


@pytest.mark.skipif(not HAS_KERNEL, reason="needs a GPU, or TRITON_INTERPRET=1 as test_in_the_interpreter sets it")
class TestGraphs:
    @pytest.mark.parametrize("kind", ["llama", "gemma3"])
    def test_padded_steps_equal_others(self, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
        from fusionkv.kernels.gpu import sparse_attention_triton

        model, pool, graphs = made(kind)
        if DEVICE.type == "cpu":
            graphs.works, graphs._capture = True, capture
            monkeypatch.setattr(batch, "sparse_attention", sparse_attention_triton.sparse_attention)
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


@pytest.mark.compile
@pytest.mark.skipif(HAS_KERNEL, reason="this run has the kernel already")
def test_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    assert "2 passed" in interpreted(__file__, "TestGraphs")


def test_which_steps() -> None:
    """Those of which no more is wanted than tokens; and none on a CPU."""
    model, pool, graphs = made("llama")
    jobs = three(60, 3, 2)
    assert graphs.suits(step(model, pool, *jobs)) == (DEVICE.type == "cuda")
    graphs.works = True
    assert graphs.suits(step(model, pool, *jobs))
    assert graphs.suits(step(model, pool, *jobs * 16))
    assert not graphs.suits(step(model, pool, *jobs * 17))
    sampler = GREEDY.sampler
    for other in (NextToken(sampler, logits=True), NextToken(sampler, votes=1), Logits(1)):
        assert not graphs.suits(step(model, pool, jobs[0], replace(jobs[1], output=other)))
    long = replace(jobs[1], ids=torch.tensor([1, 2]), positions=torch.tensor([60, 61]))
    assert not graphs.suits(step(model, pool, jobs[0], long))


def test_a_model_that_cannot_be_captured(caplog: pytest.LogCaptureFixture) -> None:
    model, pool, graphs = made("llama")
    graphs.works = True

    def fails(_: object) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    graphs.compute = fails  # type: ignore[method-assign]
    assert graphs.predict(step(model, pool, *three(60, 3, 1))) is None
    assert "not captured as CUDA graphs: operation not permitted when stream is capturing" in caplog.text
    assert not graphs.works
