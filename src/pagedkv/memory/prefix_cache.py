"""The index from a block's key to the block: open addressing over one array.

An entry is 0 where empty, else `tag << 31 | block + 1`, the tag being the low 32 bits of the
key. The tag settles almost every comparison without touching the key itself, and it tells an
entry's home when a removal moves later entries back, so there are no tombstones and look-ups do
not slow down with age. At most half of the entries are ever used.

An index holds each key once: two blocks may hold the same content, one of them is found.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pagedkv.compiling import compiled

_TAG_BITS = np.uint64(0xFFFFFFFF)
_BLOCK_BITS = 0x7FFFFFFF


def make_index(num_blocks: int) -> NDArray[np.int64]:
    """An empty index with room for `num_blocks` keys."""
    capacity = 8
    while capacity < 2 * num_blocks:
        capacity *= 2
    return np.zeros(capacity, dtype=np.int64)


@compiled
def find(
    index: NDArray[np.int64], key: NDArray[np.uint64], key0: np.uint64, key1: np.uint64
) -> int:
    """The block that `index` has for (key0, key1), or -1; `key` uint64 [num_blocks, 2]."""
    mask = len(index) - 1
    tag = int(key0 & _TAG_BITS)
    place = tag & mask
    entry = index[place]
    while entry != 0:
        if entry >> 31 == tag:
            block = int((entry & _BLOCK_BITS) - 1)
            if key[block, 0] == key0 and key[block, 1] == key1:
                return block
        place = (place + 1) & mask
        entry = index[place]
    return -1


@compiled
def insert(index: NDArray[np.int64], key: NDArray[np.uint64], block: int) -> None:
    """Add `block` under its key, which must not be in the index."""
    mask = len(index) - 1
    tag = int(key[block, 0] & _TAG_BITS)
    place = tag & mask
    while index[place] != 0:
        place = (place + 1) & mask
    index[place] = tag << 31 | (block + 1)


@compiled
def remove(index: NDArray[np.int64], key: NDArray[np.uint64], block: int) -> None:
    """Remove the entry of `block`, which must be in the index."""
    mask = len(index) - 1
    tag = int(key[block, 0] & _TAG_BITS)
    wanted = tag << 31 | (block + 1)
    hole = tag & mask
    while index[hole] != wanted:
        hole = (hole + 1) & mask
    place = (hole + 1) & mask
    entry = index[place]
    while entry != 0:
        home = (entry >> 31) & mask
        # Move an entry back when the hole lies between its home and its place.
        if ((place - home) & mask) >= ((place - hole) & mask):
            index[hole] = entry
            hole = place
        place = (place + 1) & mask
        entry = index[place]
    index[hole] = 0
