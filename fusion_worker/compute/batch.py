"""A ragged batch: rows of several requests, their keys in the KV pool, and what is recorded of their attention."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch

from fusionkv.kernels.attention import Temper, attention_scores, sparse_attention, tempered_attention
from fusionkv.kernels.segments import AttentionSpec, QuerySpan, Rotation, Spans
from fusionkv.kernels.upload import upload


@dataclass(slots=True)
class Probe:
    """Sums the attention of one span's rows to each position, over the given layers.

    scores: float32 [last position + 1], on the pool's device, complete after the forward pass.
    """

    span: QuerySpan
    layers: frozenset[int]
    scores: torch.Tensor


@dataclass(slots=True)
class Votes:
    """The attention of one span's rows to each position, by layer and KV head.

    layers: float32 [kv_heads, last position + 1] for each layer, complete after the forward pass.
    """

    span: QuerySpan
    layers: list[torch.Tensor] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Batch:
    """A ragged batch: token rows of several requests, concatenated, with the slots of their keys.

    Made in host memory; `there` copies what a forward pass reads to the pool's device.

    ids, positions: int64 [rows]; row i has position positions[i].
    slots: int64, slots of the pool to which the KV of the last len(slots) rows is written. Other rows write no KV.
    pool: [layers, tensors, slots, kv_heads, head_dim], by `KVShape`. rotations: of each layer.
    tempered: spans whose rows attend to their context at a temperature; `spans` holds all others.
    used: for each span, in the order of their rows, the number of rows at its end whose attention in the last
        layer or last hidden state is used; None for all.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    spans: Spans
    pool: torch.Tensor
    rotations: Sequence[Rotation]
    probes: Sequence[Probe] = ()
    votes: Sequence[Votes] = ()
    tempered: Sequence[tuple[QuerySpan, Temper]] = ()
    used: Sequence[int] | None = None

    @property
    def narrows(self) -> bool:
        """Whether less than half of the rows are used; with more, a separate pass would save little."""
        return self.used is not None and 2 * sum(self.used) < len(self.ids)

    def there(self) -> "Batch":
        """The batch with ids, positions and slots on the pool's device, by one copy that nobody waits for."""
        ids, positions, slots = upload([self.ids, self.positions, self.slots], self.pool.device)
        return replace(self, ids=ids, positions=positions, slots=slots)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, spec: AttentionSpec
    ) -> torch.Tensor:
        """Writes a layer's keys and values to the pool, and attends to it.

        query: [rows, q_heads, head_dim]. key, value: [rows, kv_heads, head_dim]. Returns as `query`.
        """
        k_pool, v_pool = self.pool[layer, 0], self.pool[layer, -1]
        self.write(layer, key, value)
        groups = query.shape[1] // k_pool.shape[1]
        for votes in self.votes:
            by_head = []
            for head in range(k_pool.shape[1]):
                group = slice(head * groups, (head + 1) * groups)
                own = spec._replace(sinks=None if spec.sinks is None else spec.sinks[group])
                by_head.append(attention_scores(query[:, group], k_pool[:, head : head + 1], votes.span, own))
            votes.layers.append(torch.stack(by_head))
        scores = {probe.span: probe.scores for probe in self.probes if layer in probe.layers}
        out = sparse_attention(query, k_pool, v_pool, self.spans, spec, scores)
        for span, temper in self.tempered:
            part = slice(span.start, span.stop)
            out[part] = tempered_attention(query[part], k_pool, v_pool, span, temper, spec)
        return out

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Writes a layer's keys and values, [rows, kv_heads, head_dim], to the pool; latents are both."""
        stored = slice(len(self.ids) - len(self.slots), None)
        for pool, new in zip(self.pool[layer], (key, value), strict=False):
            pool.index_copy_(0, self.slots, new[stored])

    def _all_spans(self) -> list[QuerySpan]:
        """Tempered and other spans, in the order of their rows."""
        return sorted((*self.spans, *(span for span, _ in self.tempered)), key=lambda span: span.start)

    def last(self, counts: Sequence[int]) -> "tuple[torch.Tensor, Batch]":
        """int64, the last rows of each span, and a batch of them that writes no KV; of a batch in host memory.

        The order of keys that earlier layers computed is kept.
        """
        new: dict[int, QuerySpan] = {}  # by the `stop` of the old span
        at = 0
        for span, count in zip(self._all_spans(), counts, strict=True):
            if count:
                new[span.stop] = span.last(count, at)
                at += count
        rows = [torch.arange(stop - span.rows, stop) for stop, span in new.items()]
        kept = torch.cat([self.slots[:0], *rows])
        return kept, replace(
            self,
            ids=self.ids[kept],
            positions=self.positions[kept],
            slots=self.slots[:0],
            spans=Spans([new[span.stop] for span in self.spans if span.stop in new]),
            probes=[_moved(probe, new) for probe in self.probes if probe.span.stop in new],
            votes=[_moved(votes, new) for votes in self.votes if votes.span.stop in new],
            tempered=[(new[span.stop], temper) for span, temper in self.tempered if span.stop in new],
            used=None,
        )


_Observer = TypeVar("_Observer", Probe, Votes)


def _moved(observer: _Observer, new: Mapping[int, QuerySpan]) -> _Observer:
    """The same probe or votes, with their results so far, for rows that moved in the batch."""
    moved, span, to = copy.copy(observer), observer.span, new[observer.span.stop]
    moved.span = (
        to if span.rows == to.rows else QuerySpan(to.stop - span.rows, to.stop, span.positions, span.segments)
    )
    return moved
