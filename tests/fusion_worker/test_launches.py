"""What a GPU has to be told for a pass: kernels launched, copies, and no wait for it while a pass is planned.

Passes run on torch's device `meta`, whose tensors have no data, with the Triton kernels replaced by counters. What
would wait for a GPU fails there.
"""

import copy
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fusionkv.fusion_worker import models
from fusionkv.fusion_worker.compute.jobs import AttentionScores, ForwardJob, NextToken, Output
from fusionkv.fusion_worker.compute.model_runner import forward, install, logits, position_embeddings
from fusionkv.fusion_worker.compute.scheduler import QueuedJob, ScheduledSlice
from fusionkv.fusion_worker.compute.step import Step
from fusionkv.fusion_worker.decode.sampling import Sampler, SamplingParams
from fusionkv.fusion_worker.pool.kv_pool import KVPool
from fusionkv.fusion_worker.pool.slots import SlotRange
from fusionkv.kernels import rotary
from fusionkv.kernels.segments import KVSegment, Rotation
from tests.fusion_worker.oracle import byte_tokenizer, network
from tests.kernels.inputs import rotated

triton_kernels = pytest.importorskip("fusionkv.kernels.gpu.sparse_attention_triton", reason="needs Triton")
rotary_kernels = pytest.importorskip("fusionkv.kernels.gpu.rotary_triton")
META = torch.device("meta")
CHUNK = 20
GREEDY = NextToken(Sampler(SamplingParams(8)))
# Launches of a model of three layers. A GPU takes 18.7 us for each; raise a number only for what is worth that.
DECODE, CHOOSE, PREFILL = 60, 68, 88
GEMMA_DECODE = 79


class Counting(TorchDispatchMode):
    """Counts the operations on META that launch a kernel, and copies there."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: Counter[str] = Counter()
        self.copies = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        there = [x for x in (out if isinstance(out, (tuple, list)) else [out]) if isinstance(x, torch.Tensor)]
        if any(x.device == META and x.numel() for x in there) and not func.is_view:
            name = func.overloadpacket.__name__
            given = [x for x in args if isinstance(x, torch.Tensor)]
            if name == "_to_copy" and given[0].device.type == "cpu":
                self.copies += 1
            elif not name.startswith(("empty", "detach", "_unsafe_view")):
                self.launches[name] += 1
        return out


class Kernel:
    """In place of a Triton kernel."""

    def __init__(self, name: str, counting: Counting) -> None:
        self._name, self._counting = name, counting

    def __getitem__(self, grid: Any) -> Any:
        return self

    def __call__(self, *_: object, **__: object) -> None:
        self._counting.launches[self._name] += 1


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> Counting:
    made = Counting()
    for name in ("_gather", "_attend", "_merge", "_columns"):
        monkeypatch.setattr(triton_kernels, name, Kernel(name, made))
    monkeypatch.setattr(rotary_kernels, "_rotate", Kernel("_rotate", made))
    return made


def rotate(rotation: Rotation, *given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernel's launch, or on a CPU what it computes."""
    return rotary_kernels.rotate(rotation, *given) if given[0].device == META else rotated(rotation, *given)


@pytest.fixture(scope="module")
def model() -> models.Model:
    return placed("llama")


def placed(family: str, dtype: torch.dtype = torch.float32) -> models.Model:
    """A model on META."""
    made = models.wrap(family, copy.deepcopy(network(family, dtype)), byte_tokenizer(), bytes(32), 2048)
    install(made)
    decoder, positions = made.network.model, torch.tensor([[0, 1, 100]])
    for layer, rotation in zip(decoder.layers, made.rotations, strict=True):
        embeddings = position_embeddings(decoder, layer, made.network.lm_head.weight, positions)
        rotary.install(layer.self_attn, partial(rotate, rotation), embeddings)
    for latent in (found for each in decoder.layers if (found := vars(each.self_attn).get("expand_kv"))):
        latent._keys, latent._values = latent._keys.to(META), latent._values.to(META)
    return replace(made, network=made.network.to(META), device=META)


def job(chunks: int, rows: int, output: Output[Any], own: int = 0) -> ForwardJob[Any]:
    """Rows after chunks with recomputed tokens, of which `own` are computed already."""
    keys = []
    for chunk in range(chunks):
        hidden = torch.zeros(CHUNK, dtype=torch.bool)
        hidden[chunk % CHUNK] = True
        keys.append(KVSegment(chunk * CHUNK, CHUNK, chunk * CHUNK, shift=chunk, hidden=hidden))
    fresh = torch.arange(chunks) * (CHUNK + 1)
    fresh = torch.cat([fresh[fresh < chunks * CHUNK], torch.arange(chunks * CHUNK, chunks * CHUNK + rows)])
    slot = chunks * CHUNK
    if own:
        keys.append(KVSegment(slot, own, int(fresh[0]), positions=fresh[:own]))
        fresh, slot = fresh[own:], slot + own
    return ForwardJob(torch.zeros(len(fresh), dtype=torch.int64), fresh, [SlotRange(slot, 900)], tuple(keys), output)


def run(model: models.Model, counting: Counting, jobs: Sequence[ForwardJob[Any]], predicts: bool) -> None:
    pool = KVPool.of(model.kv, 4 << 20, 4, META)
    with counting:
        step = Step.of([ScheduledSlice(QueuedJob(each), 0, each.rows) for each in jobs], model, pool.kv)
        hidden = forward(model, step.batch)
        if predicts:
            logits(model, hidden)


@pytest.mark.parametrize("chunks", [1, 15])
@pytest.mark.parametrize("requests", [1, 8])
def test_decoding(model: models.Model, counting: Counting, chunks: int, requests: int) -> None:
    """Chunks, their hidden tokens and requests add no launch and no copy: only the kernels' grids grow."""
    own = len(job(chunks, 1, GREEDY).ids) - 1
    run(model, counting, [job(chunks, 1, GREEDY, own)] * requests, predicts=True)
    assert counting.copies <= 2, "of the rows, and of the tables"
    assert counting.launches.total() <= DECODE, counting.launches


def test_decoding_with_other_norms(counting: Counting) -> None:
    """Gemma's 19, and the factor of its embeddings."""
    run(placed("gemma3"), counting, [job(1, 1, GREEDY, 1)], predicts=True)
    assert counting.launches.total() <= GEMMA_DECODE, counting.launches


def test_no_family_waits_for_a_gpu(family: str, counting: Counting) -> None:
    """In steps that are captured as graphs. In bfloat16: experts have no operator for float32."""
    made = placed(family, torch.bfloat16)
    run(made, counting, [job(1, 1, GREEDY, 1)], predicts=True)
    run(made, counting, [job(0, 5, AttentionScores(frozenset({made.kv.layers - 1})))], predicts=False)


def test_choosing(model: models.Model, counting: Counting) -> None:
    layers = frozenset(range(1, model.kv.layers))
    keys = tuple(replace(key, hidden=None) for key in job(15, 0, GREEDY).keys)
    question = replace(job(0, 5, AttentionScores(layers)), keys=keys)
    question = replace(question, positions=question.positions + 15 * CHUNK)
    run(model, counting, [question], predicts=False)
    assert counting.copies <= 3, "of the rows, the tables, and the tables of the scores"
    assert counting.launches.total() <= CHOOSE, counting.launches


@pytest.mark.parametrize("rows", [12, 200])
def test_prefill(model: models.Model, counting: Counting, rows: int) -> None:
    """Of the last layer, only the last row is computed, from a batch and tables of its own."""
    run(model, counting, [job(15, rows, GREEDY)], predicts=True)
    assert counting.launches["_gather"] == (rows > 127) * (model.kv.layers - 1), "keys in order, for many rows"
    assert counting.copies <= 5, "of the rows and tables of all layers, and of the last one"
    assert counting.launches.total() <= PREFILL, counting.launches


def test_what_waits_for_a_gpu_fails_here() -> None:
    positions = torch.zeros(3, dtype=torch.int64, device=META)
    for waits in (lambda: int(positions[-1]), positions.nonzero, positions.cpu, positions.tolist):
        with pytest.raises((RuntimeError, NotImplementedError)):
            waits()
