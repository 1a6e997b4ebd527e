"""Root mean square normalization of rows, read once and written once."""

from __future__ import annotations

import triton
import triton.language as tl

from pagedkv.attention.gpu.arithmetic import rounded


@triton.jit(do_not_specialize=["num_rows", "num_inner"])
def normalize_rows(
    out,  # [num_rows, SIZE], contiguous
    x,
    weight,  # [SIZE]
    num_rows,
    num_inner,  # rows are counted by two axes; this is the length of the second
    outer_stride,
    inner_stride,
    eps,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,  # SIZE, up to a power of two
    ROWS: tl.constexpr,
    WEIGHTED: tl.constexpr,
    PLUS_ONE: tl.constexpr,  # the weight is what is missing from 1
    ROUNDED_FIRST: tl.constexpr,  # before the weight comes in, and after
):
    """`ROWS` rows a program: x / sqrt(mean of x^2 + eps), times the weight, in float32."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    places = tl.arange(0, PADDED)
    inside = (rows < num_rows)[:, None] & (places < SIZE)[None, :]
    starts = rows // num_inner * outer_stride + rows % num_inner * inner_stride
    numbers = tl.load(x + starts[:, None] + places[None, :], mask=inside, other=0.0)
    numbers = numbers.to(tl.float32)
    numbers = numbers * tl.rsqrt(tl.sum(numbers * numbers, 1) / SIZE + eps)[:, None]
    if ROUNDED_FIRST:
        numbers = rounded(numbers, out.dtype.element_ty).to(tl.float32)
    if WEIGHTED:
        factors = tl.load(weight + places, mask=places < SIZE, other=0.0).to(tl.float32)
        if PLUS_ONE:
            factors += 1.0
        numbers *= factors[None, :]
    at = out + rows[:, None] * SIZE + places[None, :]
    tl.store(at, rounded(numbers, out.dtype.element_ty), mask=inside)
