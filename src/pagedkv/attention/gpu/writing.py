"""New keys and values, scattered into their slots: one token a program, both in one launch."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def write_rows(
    storage,
    k,
    v,
    slots,  # int64 [tokens]
    num_slots,
    page_numbers,
    key_start,
    value_start,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    NUM_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    HEADS: tl.constexpr,  # NUM_HEADS, up to a power of two
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
):
    """All heads of token `program_id(0)`; where its slot is none of the storage, nothing."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    if slot >= num_slots:
        return
    page = slot // BLOCK_SIZE * page_numbers
    offset = slot % BLOCK_SIZE
    heads = tl.arange(0, HEADS)[:, None].to(tl.int64)
    is_head = heads < NUM_HEADS

    places = tl.arange(0, KEYS)[None, :]
    mask = is_head & (places < KEY_DIM)
    row = tl.load(k + token * k_token_stride + heads * k_head_stride + places, mask=mask)
    at = page + key_start + (heads * BLOCK_SIZE + offset) * KEY_DIM + places
    tl.store(storage + at, row, mask=mask)

    places = tl.arange(0, VALUES)[None, :]
    mask = is_head & (places < VALUE_DIM)
    row = tl.load(v + token * v_token_stride + heads * v_head_stride + places, mask=mask)
    at = page + value_start + (heads * BLOCK_SIZE + offset) * VALUE_DIM + places
    tl.store(storage + at, row, mask=mask)
