"""Address translation: from a token of a sequence to a slot of the physical memory.

A sequence sees its cache as contiguous; its block table says where each logical block lies::

    token        0 .. 15   16 .. 31   32 .. 47        block size 16
    logical         0          1          2
    block table  [  7    ,     2    ,    15  ]
                               │
    token 20: logical block 20 // 16 = 1 ─┘ → block 2, offset 20 % 16 = 4 → slot 2 * 16 + 4 = 36

The slot is an index into storage that holds one token's keys and values per slot.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pagedkv.compiling import compiled_inline


class Address(NamedTuple):
    """Where one token's keys and values lie."""

    logical_block: int
    block: int
    offset: int
    slot: int


def translate(block_table: NDArray[np.int32], token: int, block_size: int) -> Address:
    """Translate one token; the caller has checked that the sequence holds it.

    >>> translate(np.array([7, 2, 15], dtype=np.int32), 20, 16)
    Address(logical_block=1, block=2, offset=4, slot=36)
    """
    logical_block, offset = divmod(token, block_size)
    block = int(block_table[logical_block])
    return Address(logical_block, block, offset, block * block_size + offset)


@compiled_inline
def write_slots(
    entries: NDArray[np.int32],
    row: int,
    start: int,
    stop: int,
    block_size: int,
    slots: NDArray[np.int64],
    position: int,
) -> None:
    """Write the slots of tokens `start` to `stop` (half open) into `slots` from `position` on.

    The sequence's block table is row `row` of `entries`.
    """
    logical_block = start // block_size
    offset = start - logical_block * block_size
    for i in range(stop - start):
        slots[position + i] = int(entries[row, logical_block]) * block_size + offset
        offset += 1
        if offset == block_size:
            offset = 0
            logical_block += 1
