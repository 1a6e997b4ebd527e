"""Rotary position embedding of all heads of a token, queries and keys in one launch.

A rotation turns pairs of numbers. Either the first half of a head is paired with its second half,
or neighbours are; and what comes out may lie either way.

    halves       [ a0 a1 a2 | b0 b1 b2 ]
    neighbours   [ a0 b0 a1 b1 a2 b2 ]
"""

from __future__ import annotations

import triton
import triton.language as tl

from pagedkv.attention.gpu.arithmetic import part_of_kernel, rounded


@part_of_kernel
def turn_heads(
    out,
    x,
    cos,
    sin,
    heads,
    num_heads,
    out_head_stride,
    x_head_stride,
    SIZE: tl.constexpr,
    ROTATED: tl.constexpr,
    PAIRS: tl.constexpr,
    REST: tl.constexpr,
    COS_STEP: tl.constexpr,
    COS_SECOND: tl.constexpr,
    IN_STEP: tl.constexpr,
    IN_SECOND: tl.constexpr,
    OUT_STEP: tl.constexpr,
    OUT_SECOND: tl.constexpr,
    IN_FLOAT32: tl.constexpr,
):
    """Heads `heads` of one token; `cos` and `sin` are the token's."""
    dtype = x.dtype.element_ty
    between = tl.float32 if IN_FLOAT32 else dtype
    is_head = (heads < num_heads)[:, None]
    pairs = tl.arange(0, PAIRS)
    is_pair = pairs < ROTATED // 2
    mask = is_head & is_pair[None, :]
    at = x + heads[:, None] * x_head_stride + pairs[None, :] * IN_STEP
    a = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(at + IN_SECOND, mask=mask, other=0.0).to(tl.float32)
    angles = pairs * COS_STEP
    cos_a = tl.load(cos + angles, mask=is_pair, other=0.0).to(tl.float32)[None, :]
    sin_a = tl.load(sin + angles, mask=is_pair, other=0.0).to(tl.float32)[None, :]
    cos_b = tl.load(cos + angles + COS_SECOND, mask=is_pair, other=0.0).to(tl.float32)[None, :]
    sin_b = tl.load(sin + angles + COS_SECOND, mask=is_pair, other=0.0).to(tl.float32)[None, :]
    # Rounded where a model rounds that computes one thing after the other.
    turned_a = rounded(a * cos_a, between).to(tl.float32)
    turned_a -= rounded(b * sin_a, between).to(tl.float32)
    turned_b = rounded(b * cos_b, between).to(tl.float32)
    turned_b += rounded(a * sin_b, between).to(tl.float32)
    to = out + heads[:, None] * out_head_stride + pairs[None, :] * OUT_STEP
    tl.store(to, rounded(turned_a, dtype), mask=mask)
    tl.store(to + OUT_SECOND, rounded(turned_b, dtype), mask=mask)
    if ROTATED < SIZE:
        rest = ROTATED + tl.arange(0, REST)
        mask = is_head & (rest < SIZE)[None, :]
        kept = tl.load(x + heads[:, None] * x_head_stride + rest[None, :], mask=mask)
        tl.store(out + heads[:, None] * out_head_stride + rest[None, :], kept, mask=mask)


@triton.jit
def rotate_heads(
    q_out,
    k_out,
    q,
    k,
    cos,
    sin,
    q_out_token_stride,
    q_out_head_stride,
    k_out_token_stride,
    k_out_head_stride,
    q_token_stride,
    q_head_stride,
    k_token_stride,
    k_head_stride,
    cos_token_stride,
    sin_token_stride,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    HEADS: tl.constexpr,  # a program
    SIZE: tl.constexpr,
    ROTATED: tl.constexpr,  # the first so many numbers of a head; the others stay
    PAIRS: tl.constexpr,  # ROTATED // 2, up to a power of two
    REST: tl.constexpr,  # SIZE - ROTATED, likewise
    # From one pair to the next, and from the first of a pair to the second.
    COS_STEP: tl.constexpr,
    COS_SECOND: tl.constexpr,
    IN_STEP: tl.constexpr,
    IN_SECOND: tl.constexpr,
    OUT_STEP: tl.constexpr,
    OUT_SECOND: tl.constexpr,
    IN_FLOAT32: tl.constexpr,
):
    """`HEADS` heads of token `program_id(0)`: first those of the queries, then of the keys."""
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    q_groups: tl.constexpr = (Q_HEADS + HEADS - 1) // HEADS
    heads = tl.arange(0, HEADS).to(tl.int64)
    cos += token * cos_token_stride
    sin += token * sin_token_stride
    if group < q_groups:
        turn_heads(
            q_out + token * q_out_token_stride, q + token * q_token_stride, cos, sin,
            group * HEADS + heads, Q_HEADS, q_out_head_stride, q_head_stride,
            SIZE, ROTATED, PAIRS, REST, COS_STEP, COS_SECOND, IN_STEP, IN_SECOND,
            OUT_STEP, OUT_SECOND, IN_FLOAT32,
        )  # fmt: skip
    else:
        turn_heads(
            k_out + token * k_out_token_stride, k + token * k_token_stride, cos, sin,
            (group - q_groups) * HEADS + heads, K_HEADS, k_out_head_stride, k_head_stride,
            SIZE, ROTATED, PAIRS, REST, COS_STEP, COS_SECOND, IN_STEP, IN_SECOND,
            OUT_STEP, OUT_SECOND, IN_FLOAT32,
        )  # fmt: skip
