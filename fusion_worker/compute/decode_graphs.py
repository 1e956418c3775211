"""Decoding steps as CUDA graphs: a GPU is told once what to launch, and from then on only with what inputs.

A step of few rows has about 1,200 launches, for which a GPU would wait longer than it computes. A graph's inputs have
fixed sizes: rows and tables are padded, and padded rows are written to a slot that nobody reads. Kernels of other
steps, and of models that can't be captured, are launched one by one.
"""

import functools
import logging
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

from fusionkv.fusion_worker.compute.batch import Batch
from fusionkv.fusion_worker.compute.jobs import NextToken
from fusionkv.fusion_worker.compute.model_runner import logits, through
from fusionkv.fusion_worker.compute.step import Step
from fusionkv.fusion_worker.decode.sampling import figures
from fusionkv.fusion_worker.models import Model
from fusionkv.fusion_worker.pool.kv_pool import KVPool
from fusionkv.kernels.gpu import has_triton
from fusionkv.kernels.gpu.segment_table import Grid, SegmentTable, TabledSpans
from fusionkv.kernels.gpu.tile_shapes import tile_for
from fusionkv.kernels.segments import KVSegment, QuerySpan, Rotation, Spans
from fusionkv.kernels.upload import pack, unpack
from fusionkv.protos.runtime.errors import first_line

log = logging.getLogger(__name__)
_MOST_ROWS = 32
# Least sizes of the tables of segments, positions and rotations, which grow by doubling; each size has a graph.
_LEAST = {"segments": 1024, "positions": 16384, "turns": 64}
_MOST_GRAPHS = 24


class Predicted(NamedTuple):
    """Of each row, valid until the next step.

    logits: float32 [rows, vocabulary]. figures: of `sampling.figures`.
    """

    logits: torch.Tensor
    figures: torch.Tensor


class Replayed(Protocol):
    """A captured call."""

    def replay(self) -> None: ...


class _Captured(NamedTuple):
    """inputs: uint8, packed, on the device. outputs: written by `graph`."""

    inputs: torch.Tensor
    graph: Replayed
    outputs: Predicted


class DecodeGraphs:
    """The graphs of a model. For the engine's thread only."""

    def __init__(self, model: Model, pool: KVPool) -> None:
        self._model, self._pool = model, pool
        self.works = model.device.type == "cuda" and model.ranks.count == 1 and has_triton()
        self._capture: Callable[[Callable[[], Predicted]], tuple[Replayed, Predicted]] = _capture
        self._captured: dict[tuple[int, ...], _Captured] = {}

    def suits(self, step: Step) -> bool:
        """Whether each row is that of an answer, of which no more is wanted than its next token."""
        outputs, batch = [one.job.output for one in step.slices], step.batch
        return (
            self.works
            and len(batch.ids) == len(batch.spans) == len(batch.slots) <= _MOST_ROWS
            and all(isinstance(each, NextToken) and not (each.logits or each.votes) for each in outputs)
            and all(one.last for one in step.slices)
        )

    def predict(self, step: Step) -> Predicted | None:
        """Computes a step that suits; None if it can't be captured."""
        try:
            return self.compute(step.batch)
        except RuntimeError as error:
            self.works = False
            log.warning("decoding steps are not captured as CUDA graphs: %s", first_line(error))
            return None

    @torch.inference_mode()
    def compute(self, batch: Batch) -> Predicted:
        """Computes a batch of one row of each request. Raises RuntimeError if it can't be captured."""
        rows = len(batch.ids)
        tables = self._tables(batch.spans)
        given = [*self._rows(batch, len(tables[0].row_positions)), *(x for table in tables for x in table.tensors())]
        packed, sizes = pack(given, self._model.device), tuple(len(x) for x in given)
        if sizes not in self._captured:
            if len(self._captured) >= _MOST_GRAPHS:
                self._captured.pop(next(iter(self._captured)))
            inputs = packed.to(self._model.device, copy=True)
            graph, outputs = self._capture(lambda: self._run(tables, unpack(inputs, given)))
            self._captured[sizes] = _Captured(inputs, graph, outputs)
        captured = self._captured[sizes]
        captured.inputs.copy_(packed, non_blocking=True)
        captured.graph.replay()
        return Predicted(*(each[:rows] for each in captured.outputs))

    def _rows(self, batch: Batch, padded: int) -> list[torch.Tensor]:
        """Ids, positions and slots, padded."""
        more = padded - len(batch.ids)
        filled = zip((batch.ids, batch.positions, batch.slots), (0, 0, self._pool.scratch), strict=True)
        return [torch.nn.functional.pad(x, (0, more), value=value) for x, value in filled]

    def _rotations(self) -> list[Rotation]:
        """The different ones of all layers."""
        return list(dict.fromkeys(self._model.rotations))

    def _tables(self, spans: Spans) -> list[SegmentTable]:
        """A padded table for each rotation."""
        rows = 1 << (len(spans) - 1).bit_length()
        alone = (KVSegment(self._pool.scratch, 1, 0),)
        more = [QuerySpan(row, row + 1, torch.zeros(1, dtype=torch.int64), alone) for row in range(len(spans), rows)]
        shape, heads = self._model.kv, self._model.network.config.num_attention_heads
        from fusionkv.kernels.gpu.tiles_triton import processors  # needs Triton

        tile = tile_for(self._model.device, shape.head_dim, shape.dtype)
        grid = Grid.of_decoding(heads, shape.kv_heads, tile.rows, processors(self._model.device), rows)
        return [SegmentTable.of([*spans, *more], each, grid).padded(**_LEAST) for each in self._rotations()]

    def _run(self, tables: list[SegmentTable], given: list[torch.Tensor]) -> Predicted:
        """The step, whose inputs are all in `given`. tables: their sizes and launches."""
        ids, positions, slots, *tensors = given
        there = {}
        for rotation, table in zip(self._rotations(), tables, strict=True):
            own, tensors = tensors[: len(table.tensors())], tensors[len(table.tensors()) :]
            there[rotation] = table.with_tensors(own)
        batch = Batch(ids, positions, slots, TabledSpans(there), self._pool.kv, self._model.rotations)
        hidden = through(self._model, batch)
        predicted = logits(self._model, hidden)
        return Predicted(predicted, figures(predicted))


def _capture(run: Callable[[], Predicted]) -> tuple[Replayed, Predicted]:
    """Captures a call's launches. Calls it once before: the first call compiles kernels and allocates."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # Other threads may copy and allocate meanwhile.
    with torch.cuda.graph(graph, _memory(), stream, capture_error_mode="thread_local"):
        outputs = run()
    return graph, outputs


@functools.cache
def _memory() -> Any:
    """Of what graphs compute in between; they run one after another."""
    return torch.cuda.graph_pool_handle()
