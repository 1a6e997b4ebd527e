"""What the kernels compute with, on a device and in Triton's interpreter alike.

The interpreter (`TRITON_INTERPRET=1`) runs the same kernels with NumPy, which has no bfloat16: it
multiplies its bits as if they were integers, and cuts float32 off instead of rounding it. Both are
gone round here, so that what is tested without a device is what a device computes.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from triton import knobs

INTERPRETED = tl.constexpr(bool(knobs.runtime.interpret))
"""Whether kernels run in the interpreter. Triton decides so when a kernel is defined."""

LOG2_E = tl.constexpr(1.4426950408889634)


def part_of_kernel(function: Any) -> Any:
    """`triton.jit` for what kernels call.

    The interpreter would prepare the whole language anew at each call, which takes it longer than
    the call; within a kernel plain Python does the same.
    """
    return function if INTERPRETED else triton.jit(function)


@part_of_kernel
def product(a, b, PRECISION: tl.constexpr):
    """`a` [M, K] times `b` [K, N] of the same dtype, in float32."""
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision=PRECISION)


@part_of_kernel
def product_added(a, b, sums, PRECISION: tl.constexpr):
    """`sums` [M, N] float32 and the product of `a` and `b`."""
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc=sums, input_precision=PRECISION)


@part_of_kernel
def rounded(numbers, dtype: tl.constexpr):
    """float32 `numbers` in `dtype`, to nearest, ties to even."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = numbers.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        numbers = bits.to(tl.float32, bitcast=True)
    return numbers.to(dtype)


@part_of_kernel
def tanh(x):
    """With the relative precision of float32, also near 0, where a large cap needs it."""
    square = x * x
    # x - x^3/3 + 2x^5/15 - 17x^7/315 + 62x^9/2835, whose next term is below 1e-8 of x here.
    series = 62.0 / 2835.0
    series = series * square - 17.0 / 315.0
    series = series * square + 2.0 / 15.0
    series = series * square - 1.0 / 3.0
    near = x + x * square * series
    # From 20 on it is 1, and long before the power is too large for a float; a NaN stays one.
    bounded = tl.where(x > 20.0, 20.0, x)
    far = 1.0 - 2.0 / (tl.exp2(bounded * (2.0 * LOG2_E)) + 1.0)
    return tl.where(tl.abs(x) < 0.25, near, far)
