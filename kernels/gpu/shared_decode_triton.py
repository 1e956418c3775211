"""Decoding on a GPU for requests that share chunks: one program for each tile of rows of *several* requests.

The keys of a shared run of slots are read once for a tile. Each row is rotated by its own request's shift, and has
its own positions and hidden slots. The smallest matrix product has 16 rows, of which one request fills as many as a
KV head has query heads, so rows of other requests cost little more than their rotations. Results are partial, like
those of other parts.
"""

import triton
import triton.language as tl

from fusionkv.kernels.gpu.tiles_triton import key_positions, load_turned, product, update, visible


@triton.jit
def attend_shared(  # type: ignore[no-untyped-def]
    q_ptr,  # [rows, q_heads, head_dim]
    k_ptr,  # [slots, kv_heads, head_dim]
    v_ptr,  # [slots, kv_heads, head_dim]
    partial_ptr,  # float32 [partial results, q_heads, head_dim]
    lse_ptr,  # float32 [partial results, q_heads], to base 2
    items_ptr,
    members_ptr,
    segments_ptr,
    positions_ptr,
    row_positions_ptr,
    turns_ptr,
    scale,  # times log2(e)
    q_row_stride,
    q_head_stride,
    SLOT_STRIDE: tl.constexpr,
    KV_HEAD_STRIDE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    GROUPS: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
    WIDEN: tl.constexpr,
):
    head = tl.program_id(1)
    item_ptr = items_ptr + 4 * tl.program_id(0)
    first_member, members = tl.load(item_ptr), tl.load(item_ptr + 1)
    first_segment, pieces = tl.load(item_ptr + 2), tl.load(item_ptr + 3)

    # Row m is member m // GROUPS, head m % GROUPS of the group.
    m = tl.arange(0, ROWS)
    valid = (m < TILE * GROUPS) & (m // GROUPS < members)
    member_ptr = members_ptr + 2 * (first_member + m // GROUPS)
    row = tl.load(member_ptr, mask=valid, other=0).to(tl.int64)
    q_head = head * GROUPS + m % GROUPS
    q_position = tl.load(row_positions_ptr + row, mask=valid, other=-1)
    q_rows = q_ptr + row * q_row_stride + q_head * q_head_stride
    d = tl.arange(0, DIM)
    n = tl.arange(0, BLOCK_KEYS)
    channel = (d < HEAD_DIM)[None, :]

    high = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIM], tl.float32)
    for piece in range(pieces):
        # The segments of a piece are listed by member, all with the same slots.
        segment = first_segment + piece * members
        slot, length = tl.load(segments_ptr + 6 * segment), tl.load(segments_ptr + 6 * segment + 1)
        segment_ptr = segments_ptr + 6 * (segment + m // GROUPS)
        first = tl.load(segment_ptr + 2, mask=valid, other=0)
        turn = tl.load(segment_ptr + 3, mask=valid, other=0)
        own = tl.load(segment_ptr + 4, mask=valid, other=-1)
        turn_rows = (turns_ptr + turn * ROTARY_DIM)[:, None]
        q = load_turned(q_rows, valid, turn_rows, HEAD_DIM, DIM, ROTARY_DIM, INTERLEAVED)
        at = slot.to(tl.int64) * SLOT_STRIDE + head * KV_HEAD_STRIDE
        for start in range(0, length, BLOCK_KEYS):
            there = start + n < length
            slots = (start + n)[None, :]
            position = key_positions(positions_ptr, own[:, None], first[:, None], slots, length)
            k_at = k_ptr + at + (n[None, :] * SLOT_STRIDE + d[:, None])
            k = tl.load(k_at, mask=there[None, :] & (d < HEAD_DIM)[:, None], other=0.0)
            scores = product(q, k, WIDEN) * scale
            scores = tl.where(visible(position, q_position, WINDOW), scores, float("-inf"))
            v_at = v_ptr + at + (n[:, None] * SLOT_STRIDE + d[None, :])
            v = tl.load(v_at, mask=there[:, None] & channel, other=0.0)
            high, total, acc = update(scores, v, high, total, acc, WIDEN)
            at += BLOCK_KEYS * SLOT_STRIDE

    acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    to = tl.load(member_ptr + 1, mask=valid, other=0).to(tl.int64) * (tl.num_programs(1) * GROUPS) + q_head
    tl.store(lse_ptr + to, high + tl.log2(total), mask=valid)
    tl.store(partial_ptr + (to * HEAD_DIM)[:, None] + d[None, :], acc, mask=valid[:, None] & channel)
