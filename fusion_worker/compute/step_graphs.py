"""Steps of few rows as CUDA graphs: a GPU is told once what to launch, and from then on only with what inputs.

A step that decodes, or in which a question's rows choose tokens, has hundreds of launches, for which a GPU would wait
longer than it computes. A graph's inputs have fixed sizes: rows and tables are padded, and padded rows are written to
a slot that nobody reads. Kernels of other steps, and of models that can't be captured, are launched one by one.
"""

import functools
import logging
import math
import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch

from fusionkv.fusion_worker.compute.batch import Batch, Probe
from fusionkv.fusion_worker.compute.jobs import AttentionScores, NextToken
from fusionkv.fusion_worker.compute.model_runner import logits, through
from fusionkv.fusion_worker.compute.step import Step
from fusionkv.fusion_worker.decode.sampling import figures
from fusionkv.fusion_worker.models import Model
from fusionkv.fusion_worker.pool.kv_pool import KVPool
from fusionkv.kernels.gpu import has_triton
from fusionkv.kernels.gpu.segment_table import Grid, OrderedTable, SegmentTable, TabledSpans
from fusionkv.kernels.gpu.tile_shapes import tile_for
from fusionkv.kernels.segments import KVSegment, QuerySpan, Rotation
from fusionkv.kernels.upload import pack, unpack
from fusionkv.protos.runtime.errors import first_line

log = logging.getLogger(__name__)
_Outputs = tuple[torch.Tensor, ...]
_T = TypeVar("_T")
_MOST_ROWS = 32
# Of a step that chooses: a question has 16 to 80, and more keys take a GPU longer than their launches.
_MOST_SCORED_ROWS, _MOST_SCORED_KEYS = 128, 32768
# Least sizes of the tables of segments, positions and rotations, which grow by doubling; each size has a graph.
_LEAST = {"segments": 1024, "positions": 16384, "turns": 64}
_MOST_GRAPHS = 32
_RETRY_SECONDS = 60.0  # after a capture for which memory was short


class Predicted(NamedTuple):
    """Of each row, valid until the next step.

    logits: float32 [rows, vocabulary]. figures: of `sampling.figures`.
    """

    logits: torch.Tensor
    figures: torch.Tensor


class _Captured(NamedTuple):
    """inputs: uint8, packed, on the device. outputs: written by `graph`."""

    inputs: torch.Tensor
    graph: Any  # a torch.cuda.CUDAGraph
    outputs: _Outputs


class StepGraphs:
    """The graphs of a model. For the engine's thread only."""

    def __init__(self, model: Model, pool: KVPool) -> None:
        self._model, self._pool = model, pool
        self.works = model.device.type == "cuda" and model.ranks.count == 1 and has_triton()
        self._failed: dict[str, float] = {}  # what can't be captured, and until when, on the monotonic clock
        self._capture: Callable[[Callable[[], _Outputs]], tuple[Any, _Outputs]] = _capture
        self._captured: dict[tuple[Hashable, ...], _Captured] = {}

    def decodes(self, step: Step) -> bool:
        """Whether `predict` computes the step: each row is of an answer, and only its next token is wanted."""
        outputs, batch = [one.job.output for one in step.slices], step.batch
        return (
            self.works
            and self._failed.get("decoding", 0.0) < time.monotonic()
            and len(batch.ids) == len(batch.spans) == len(batch.slots) <= _MOST_ROWS
            and all(isinstance(each, NextToken) and not (each.logits or each.votes) for each in outputs)
            and all(one.last for one in step.slices)
        )

    def chooses(self, step: Step) -> bool:
        """Whether `score` computes the step: a question's rows, of which only the attention is wanted."""
        batch = step.batch
        return (
            self.works
            and self._failed.get("choosing", 0.0) < time.monotonic()
            and len(step.slices) == len(batch.spans) == len(batch.probes) == 1
            and isinstance(step.slices[0].job.output, AttentionScores)
            and len(batch.ids) == len(batch.slots) <= _MOST_SCORED_ROWS
            and len(batch.probes[0].scores) <= _MOST_SCORED_KEYS
        )

    def predict(self, step: Step) -> Predicted | None:
        """Computes a step that decodes; None if it can't be captured."""
        return self._tried("decoding", self.compute, step.batch)

    def score(self, step: Step) -> bool:
        """Computes the scores of a step that chooses; False if it can't be captured."""
        found = self._tried("choosing", self.attention, step.batch)
        if found is not None:
            step.batch.probes[0].scores.copy_(found)
        return found is not None

    def _tried(self, what: str, compute: Callable[[Batch], _T], batch: Batch) -> _T | None:
        try:
            return compute(batch)
        except Exception as error:  # Triton's are no RuntimeError; what is no fault of the capture comes up again
            # Memory may be free again later; all else would fail each time.
            short = isinstance(error, torch.OutOfMemoryError)
            self._failed[what] = time.monotonic() + (_RETRY_SECONDS if short else math.inf)
            log.warning("steps of %s are not captured as CUDA graphs: %s", what, first_line(error))
            return None

    @torch.inference_mode()
    def compute(self, batch: Batch) -> Predicted:
        """Computes a batch of one row of each request."""
        rows = 1 << (len(batch.ids) - 1).bit_length()
        alone = (KVSegment(self._pool.capacity, 1, 0),)
        more = [
            QuerySpan(row, row + 1, torch.zeros(1, dtype=torch.int64), alone) for row in range(len(batch.ids), rows)
        ]
        grid, spans = _grid(self._model).decoding(rows), [*batch.spans, *more]
        tables = [SegmentTable.of(spans, each, grid).padded(**_LEAST, tiles=rows) for each in _rotations(self._model)]
        outputs = self._replayed(self._predicted, None, batch, rows, tables)
        return Predicted(*(each[: len(batch.ids)] for each in outputs))

    @torch.inference_mode()
    def attention(self, batch: Batch) -> torch.Tensor:
        """The scores of a batch's single probe, float32 [last position + 1], valid until the next step."""
        (span,), (probe,) = batch.spans, batch.probes
        grid = _grid(self._model)
        tables = [OrderedTable.padded(span, each, grid, self._pool.capacity) for each in _rotations(self._model)]
        rows, keys = len(tables[0].scored), len(tables[0].slots)
        (scores,) = self._replayed(partial(self._scored, probe.layers, keys), probe.layers, batch, rows, tables)
        return scores[: len(probe.scores)]

    def _replayed(
        self,
        run: Callable[[Batch], _Outputs],
        what: Hashable,
        batch: Batch,
        rows: int,
        tables: Sequence[SegmentTable | OrderedTable],
    ) -> _Outputs:
        """What `run` gives for a batch that is padded to `rows`, by a graph for each `what` and sizes of inputs.

        tables: padded, of each rotation.
        """
        filled = zip((batch.ids, batch.positions, batch.slots), (0, 0, self._pool.capacity), strict=True)
        given = [torch.nn.functional.pad(x, (0, rows - len(x)), value=value) for x, value in filled]
        given += [x for table in tables for x in table.tensors()]
        packed, key = pack(given, self._model.device), (what, *(len(x) for x in given))
        if key not in self._captured:
            if len(self._captured) >= _MOST_GRAPHS:
                self._captured.pop(next(iter(self._captured)))
            inputs = packed.to(self._model.device, copy=True)
            graph, outputs = self._capture(lambda: run(self._batch(tables, unpack(inputs, given))))
            self._captured[key] = _Captured(inputs, graph, outputs)
        captured = self._captured[key] = self._captured.pop(key)  # now the last to go
        captured.inputs.copy_(packed, non_blocking=True)
        captured.graph.replay()
        return captured.outputs

    def _batch(self, tables: Sequence[SegmentTable | OrderedTable], given: list[torch.Tensor]) -> Batch:
        """The padded batch, whose tensors are all in `given`. tables: their sizes and launches."""
        ids, positions, slots, *tensors = given
        there = {}
        for rotation, table in zip(_rotations(self._model), tables, strict=True):
            own, tensors = tensors[: len(table.tensors())], tensors[len(table.tensors()) :]
            there[rotation] = table.with_tensors(own)
        return Batch(ids, positions, slots, TabledSpans(there), self._pool.kv, self._model.rotations)

    def _predicted(self, batch: Batch) -> Predicted:
        predicted = logits(self._model, through(self._model, batch))
        return Predicted(predicted, figures(predicted))

    def _scored(self, layers: frozenset[int], keys: int, batch: Batch) -> _Outputs:
        rows = QuerySpan(0, len(batch.ids), batch.positions, ())
        probe = Probe(rows, layers, torch.zeros(keys, device=batch.pool.device))
        through(self._model, replace(batch, probes=(probe,)))
        return (probe.scores,)


def _rotations(model: Model) -> list[Rotation]:
    """The different ones of all layers."""
    return list(dict.fromkeys(model.rotations))


def _grid(model: Model) -> Grid:
    from fusionkv.kernels.gpu.tiles_triton import processors  # needs Triton

    tile = tile_for(model.device, model.kv.head_dim, model.kv.dtype)
    heads: int = model.network.config.num_attention_heads
    return Grid(heads, model.kv.kv_heads, tile.rows, processors(model.device))


def _capture(run: Callable[[], _Outputs]) -> tuple[Any, _Outputs]:
    """Captures a call's launches. Calls it once before: the first call compiles kernels and allocates."""
    stream, memory = _beside()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    try:
        # Where a capture's end fails, torch's context stays on the stream, which the outer one leaves. Other threads
        # may copy and allocate meanwhile.
        captured = torch.cuda.graph(graph, memory, stream, capture_error_mode="thread_local")
        with torch.cuda.stream(stream), captured:
            outputs = run()
    except Exception:
        # Otherwise torch's allocator believes that the capture goes on, and reuses no memory of several streams.
        with suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(stream.device_index, memory)
        raise
    return graph, outputs


@functools.cache
def _beside() -> tuple[torch.cuda.Stream, Any]:
    """The stream of captures, and the memory of what graphs compute in between; they run one after another."""
    return torch.cuda.Stream(), torch.cuda.graph_pool_handle()
