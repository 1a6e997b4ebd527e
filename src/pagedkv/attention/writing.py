"""New keys and values, scattered into their slots."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedkv.attention.vectors import copy_row
from pagedkv.compiling import compiled_in_place


@compiled_in_place
def write_rows(
    storage: NDArray[Any],
    page_numbers: int,
    block_size: int,
    num_heads: int,
    start: int,
    dim: int,
    given: NDArray[Any],
    token_stride: int,
    head_stride: int,
    slots: NDArray[np.int64],
    half: int,
) -> None:
    """One layer's keys, or its values, which begin at `start` of a page."""
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


@compiled_in_place
def write(
    storage: NDArray[Any],
    page_numbers: int,
    block_size: int,
    num_blocks: int,
    num_heads: int,
    key_start: int,
    key_dim: int,
    keys: NDArray[Any],
    key_token_stride: int,
    key_head_stride: int,
    value_start: int,
    value_dim: int,
    values: NDArray[Any],
    value_token_stride: int,
    value_head_stride: int,
    slots: NDArray[np.int64],
    half: int,
) -> int:
    """One layer's keys and values of new tokens; a slot of -1 is padding.

    Returns -1; or, with nothing written, the first index whose slot is neither padding nor a slot
    of the storage.
    """
    for i in range(len(slots)):
        if slots[i] < -1 or slots[i] >= num_blocks * block_size:
            return i
    write_rows(
        storage,
        page_numbers,
        block_size,
        num_heads,
        key_start,
        key_dim,
        keys,
        key_token_stride,
        key_head_stride,
        slots,
        half,
    )
    write_rows(
        storage,
        page_numbers,
        block_size,
        num_heads,
        value_start,
        value_dim,
        values,
        value_token_stride,
        value_head_stride,
        slots,
        half,
    )
    return -1
