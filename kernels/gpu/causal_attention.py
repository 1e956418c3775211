"""Attention of rows to all tokens before them by torch's fused operators, where no key was moved or recomputed.

That is full attention, and the encoding of chunks: flash attention computes it faster than the kernel for any keys.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn.functional import scaled_dot_product_attention

from fusionkv.kernels.segments import QuerySpan, Rotation, Spans
from fusionkv.kernels.upload import upload

# Fewer rows, as of a question, leave most of a GPU idle unless their keys are split into parts.
LEAST_ROWS = 128
Attend = Callable[..., torch.Tensor]  # as `attention.sparse_attention`


class _Split(NamedTuple):
    """plain: spans with the slots of all their keys, in prompt order. rest: all other spans."""

    plain: list[tuple[QuerySpan, slice | torch.Tensor]]
    rest: Spans


def sparse_attention(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    spans: Spans,
    rotation: Rotation,
    scale: float,
    window: int | None,
    attend: Attend,
) -> torch.Tensor:
    """The same as `attention.sparse_attention`. attend: computes spans with other keys."""
    if not usable(q, k_pool):
        return attend(q, k_pool, v_pool, spans, rotation, scale, window)
    # It loads torch's compiler, for seconds, which processes without a GPU do not need.
    from torch.nn.attention.bias import causal_lower_right

    plain, rest = spans.once(_split, window, q.device)
    out = attend(q, k_pool, v_pool, rest, rotation, scale, window) if rest else torch.empty_like(q)
    for span, slots in plain:
        rows = q[span.start : span.stop]
        query, key, value = (x.transpose(0, 1)[None] for x in (rows, k_pool[slots], v_pool[slots]))
        mask = causal_lower_right(span.rows, int(span.positions[-1]) + 1)
        found = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=True)
        out[span.start : span.stop] = found[0].transpose(0, 1)
    return out


def usable(q: torch.Tensor, k_pool: torch.Tensor) -> bool:
    """Whether torch's flash attention computes these queries; other operators would write the mask."""
    query, key = (x[:1].transpose(0, 1)[None] for x in (q, k_pool))
    return can_use_flash_attention(SDPAParams(query, key, key, None, 0.0, True, True))


def _split(spans: Spans, window: int | None, device: torch.device) -> _Split:
    runs = {span: slots_in_order(span, window) for span in spans}
    plain: list[tuple[QuerySpan, slice | torch.Tensor]] = []
    for span, slots in runs.items():
        if len(slots) == 1:
            plain.append((span, slice(slots[0].start, slots[0].stop)))
        elif slots:
            numbers = torch.cat([torch.arange(run.start, run.stop) for run in slots])
            plain.append((span, upload([numbers], device)[0]))
    return _Split(plain, Spans([span for span in spans if not runs[span]]) if plain else spans)


def slots_in_order(span: QuerySpan, window: int | None) -> list[range]:
    """Runs of slots of all keys of a span, in prompt order; empty unless it is causal attention of many rows."""
    end = int(span.positions[-1]) + 1
    if span.rows < LEAST_ROWS or int(span.positions[0]) != end - span.rows or (window is not None and window < end):
        return []
    runs: list[range] = []
    at = 0
    for segment in span.segments:
        if segment.first != at or segment.shift or segment.listed is not None:
            return []
        at += segment.length
        if runs and runs[-1].stop == segment.start:
            runs[-1] = range(runs[-1].start, segment.stop)
        else:
            runs.append(range(segment.start, segment.stop))
    return runs if at == end else []
