"""The parts of a row whose context was cut, put together by their weights."""

from __future__ import annotations

import triton
import triton.language as tl

from pagedkv.attention.gpu.arithmetic import LOG2_E, rounded
from pagedkv.attention.gpu.pieces import (
    ENTRY_COLUMNS,
    ENTRY_EACH,
    ENTRY_PARTS,
    ENTRY_PLACE,
    ENTRY_STRIDE,
    ENTRY_TOKEN,
)

_COLUMNS = tl.constexpr(ENTRY_COLUMNS)
_PLACE = tl.constexpr(ENTRY_PLACE)
_PARTS = tl.constexpr(ENTRY_PARTS)
_STRIDE = tl.constexpr(ENTRY_STRIDE)
_TOKEN = tl.constexpr(ENTRY_TOKEN)
_EACH = tl.constexpr(ENTRY_EACH)


@triton.jit
def combine_parts(
    out,
    entries,  # int32 [n, ENTRY_COLUMNS]
    sinks,
    parts,  # float32 [place, KV head, VALUE_DIM]
    part_scores,  # float32 [place, KV head], logarithms to base 2; -inf for a part not seen
    out_token_stride,
    out_head_stride,
    NUM_HEADS: tl.constexpr,  # KV heads
    HEADS_EACH: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUES: tl.constexpr,
    PARTS: tl.constexpr,
    SINKS: tl.constexpr,
):
    """One row for one KV head, `PARTS` parts at a time."""
    entry = entries + tl.program_id(0) // NUM_HEADS * _COLUMNS
    num_parts = tl.load(entry + _PARTS)
    if num_parts == 0:
        return
    head = tl.program_id(0) % NUM_HEADS
    query_head = head * HEADS_EACH + tl.load(entry + _EACH)
    place = tl.load(entry + _PLACE)
    stride = tl.load(entry + _STRIDE)
    value_places = tl.arange(0, VALUES)
    is_value = value_places < VALUE_DIM

    peak = float("-inf")
    total = 0.0
    if SINKS:  # counted here and not in the parts: once
        peak = tl.load(sinks + query_head).to(tl.float32) * LOG2_E
        total = tl.where(peak == float("-inf"), 0.0, 1.0)
    sums = tl.zeros([VALUES], tl.float32)
    for start in range(0, num_parts, PARTS):
        part = start + tl.arange(0, PARTS)
        is_part = part < num_parts
        at = (place + part * stride).to(tl.int64) * NUM_HEADS + head
        scores = tl.load(part_scores + at, mask=is_part, other=float("-inf"))
        values = tl.load(
            parts + at[:, None] * VALUE_DIM + value_places[None, :],
            mask=is_part[:, None] & is_value[None, :],
            other=0.0,
        )
        higher = tl.maximum(peak, tl.max(scores, 0))
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - shift)
        shrink = tl.exp2(peak - shift)
        peak = higher
        total = total * shrink + tl.sum(weights, 0)
        sums = sums * shrink + tl.sum(weights[:, None] * values, 0)
    token = tl.load(entry + _TOKEN).to(tl.int64)
    out_at = out + token * out_token_stride + query_head * out_head_stride
    sums = sums / tl.where(total > 0.0, total, 1.0)
    tl.store(out_at + value_places, rounded(sums, out.dtype.element_ty), mask=is_value)
