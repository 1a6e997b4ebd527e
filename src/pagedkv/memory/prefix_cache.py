"""The index from a block's key to the block: open addressing over one array.

An entry is `block + 1`, or 0 where empty; a key's home is its low bits, which are as random as a
keyed hash is. A removal moves later entries back, so there are no tombstones and look-ups do not
slow down with age. At most one entry in eight is ever used: probes end at the first place, which
the processor can foresee, and that is worth more than a small index.

Functions take the whole pool: an array passed on its own costs Numba two atomic counts a call,
which is more than the look-up itself.

An index holds each key once: two blocks may hold the same content, one of them is found.
"""

from __future__ import annotations

import numpy as np

from pagedkv.compiling import compiled_inline, prefetch
from pagedkv.memory.blocks import BlockPool


@compiled_inline
def _home(pool: BlockPool, key0: np.uint64) -> int:
    return np.int64(key0 & np.uint64(len(pool.key_index) - 1))  # type: ignore[return-value]


@compiled_inline
def expect(pool: BlockPool, key0: np.uint64) -> None:
    """The index will soon be asked about a key that begins with `key0`: fetch its place now.

    Places are random, so an index larger than the cache costs a miss each time, unless the next
    ones are on their way while this one is worked on.
    """
    prefetch(pool.key_index, _home(pool, key0))


@compiled_inline
def find(pool: BlockPool, key0: np.uint64, key1: np.uint64) -> int:
    """The block that the index has for (key0, key1), or -1."""
    mask = len(pool.key_index) - 1
    place = _home(pool, key0)
    while pool.key_index[place] != 0:
        block = np.int64(pool.key_index[place]) - 1
        if pool.key[block, 0] == key0 and pool.key[block, 1] == key1:
            return block  # type: ignore[return-value]
        place = (place + 1) & mask
    return -1


@compiled_inline
def insert(pool: BlockPool, block: int) -> int:
    """Add `block` under its key and return -1, or return the block that has the key already."""
    mask = len(pool.key_index) - 1
    key0, key1 = pool.key[block, 0], pool.key[block, 1]
    place = _home(pool, key0)
    while pool.key_index[place] != 0:
        other = np.int64(pool.key_index[place]) - 1
        if pool.key[other, 0] == key0 and pool.key[other, 1] == key1:
            return other  # type: ignore[return-value]
        place = (place + 1) & mask
    pool.key_index[place] = block + 1
    return -1


@compiled_inline
def remove(pool: BlockPool, block: int) -> None:
    """Remove the entry of `block`, which must be in the index."""
    mask = len(pool.key_index) - 1
    hole = _home(pool, pool.key[block, 0])
    while pool.key_index[hole] != block + 1:
        hole = (hole + 1) & mask
    place = (hole + 1) & mask
    while pool.key_index[place] != 0:
        home = _home(pool, pool.key[np.int64(pool.key_index[place]) - 1, 0])
        # Move an entry back when the hole lies between its home and its place.
        if ((place - home) & mask) >= ((place - hole) & mask):
            pool.key_index[hole] = pool.key_index[place]
            hole = place
        place = (place + 1) & mask
    pool.key_index[hole] = 0
