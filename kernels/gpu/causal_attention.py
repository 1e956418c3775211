"""Attention of consecutive rows at the end of their keys, by torch's flash attention.

That is full attention, the encoding of chunks, and long questions: flash attention computes it faster than the kernel
for rows anywhere in a prompt.
"""

from collections.abc import Callable, Mapping

import torch
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn.functional import scaled_dot_product_attention

from fusionkv.kernels.segments import AttentionSpec, QuerySpan, Spans

# Fewer rows, as of a question, leave most of a GPU idle unless their keys are split into parts.
LEAST_ROWS = 128
Attend = Callable[..., torch.Tensor]  # as `attention.sparse_attention`


def sparse_attention(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    spans: Spans,
    spec: AttentionSpec,
    scores: Mapping[QuerySpan, torch.Tensor],
    attend: Attend,
) -> torch.Tensor:
    """The same as `attention.sparse_attention`. attend: computes all other spans."""
    plain, rest = Spans(), spans
    if spec.sinks is None and usable(q, k_pool):  # torch's operators have no sinks
        plain, rest = spans.once(_split, spec.window, frozenset(scores))
    out = attend(q, k_pool, v_pool, rest, spec, scores)
    if plain:
        # It loads torch's compiler, for seconds, which processes without a GPU do not need.
        from torch.nn.attention.bias import causal_lower_right
    for span in plain:
        order = span.in_order(spec.rotation, q.device)
        ordered = q[span.start : span.stop], order.keys(k_pool), v_pool.index_select(0, order.slots)
        query, key, value = (x.transpose(0, 1)[None] for x in ordered)
        mask = causal_lower_right(span.rows, len(order.slots))
        found = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=spec.scale, enable_gqa=True)
        out[span.start : span.stop] = found[0].transpose(0, 1)
    return out


def usable(q: torch.Tensor, k_pool: torch.Tensor) -> bool:
    """Whether torch's flash attention computes these queries; other operators would write the mask."""
    query, key = (x[:1].transpose(0, 1)[None] for x in (q, k_pool))
    return can_use_flash_attention(SDPAParams(query, key, key, None, 0.0, True, True))


def is_causal(span: QuerySpan, window: int | None) -> bool:
    """Whether a span has many rows, which are the last ones of its keys and see all keys before them."""
    first, end = int(span.positions[0]), int(span.positions[-1]) + 1
    return span.rows >= LEAST_ROWS and first == end - span.rows and (window is None or window >= end)


def _split(spans: Spans, window: int | None, scored: frozenset[QuerySpan]) -> tuple[Spans, Spans]:
    plain = Spans([span for span in spans if span not in scored and is_causal(span, window)])
    return plain, Spans([span for span in spans if span not in plain]) if plain else spans
