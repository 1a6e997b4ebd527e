"""New keys and values, scattered into their slots."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedkv.attention.vectors import copy_row
from pagedkv.compiling import compiled


@compiled
def first_outside(slots: NDArray[np.int64], num_slots: int) -> int:
    """The first index whose slot is neither padding nor a slot of the storage; -1 without one."""
    for i in range(len(slots)):
        if slots[i] < -1 or slots[i] >= num_slots:
            return i
    return -1


@compiled
def write(
    storage: NDArray[Any],
    start: int,
    page_numbers: int,
    block_size: int,
    num_heads: int,
    dim: int,
    given: NDArray[Any],
    token_stride: int,
    head_stride: int,
    slots: NDArray[np.int64],
    half: int,
) -> None:
    """One layer's keys, or its values, of new tokens.

    They begin at `start` of a page; a slot below 0 is padding. All slots have been checked.
    """
    for token in range(len(slots)):
        if slots[token] < 0:
            continue
        block = slots[token] // block_size
        offset = slots[token] - block * block_size
        target = block * page_numbers + start + offset * dim
        source = token * token_stride
        for _ in range(num_heads):
            copy_row(given, source, storage, target, dim, half)
            target += block_size * dim
            source += head_stride
