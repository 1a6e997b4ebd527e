"""The activated half of a row times its other half."""

from __future__ import annotations

import triton
import triton.language as tl

from pagedkv.attention.gpu.arithmetic import rounded


@triton.jit
def multiply_by_gate(
    out,  # [rows, SIZE], contiguous
    halves,  # [rows, 2 * SIZE]: what is activated, and what it is multiplied by
    row_stride,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_GELU: tl.constexpr,  # by its tanh approximation; else SiLU
):
    """The `program_id(1)`th `BLOCK` numbers of row `program_id(0)`."""
    row = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = places < SIZE
    at = halves + row * row_stride + places
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + SIZE, mask=inside, other=0.0).to(tl.float32)
    x = gate
    if IS_GELU:
        # (1 + tanh(z)) / 2 is the logistic function of 2 z, which loses nothing for z << 0.
        x = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    # A power of more is infinite; with this one the result is as good as 0 already.
    activated = gate / (1.0 + tl.exp(tl.minimum(-x, 88.0)))
    dtype = out.dtype.element_ty
    activated = rounded(activated, dtype).to(tl.float32)
    tl.store(out + row * SIZE + places, rounded(activated * up, dtype), mask=inside)
