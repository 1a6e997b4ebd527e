"""What is known of each physical block, and where: the columns that all of `memory` works on."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

NO_KEY, PENDING, PUBLISHED = 0, 1, 2
"""States of a block's key: none; known, but the content is not there yet; in the index."""

FREE, CACHED, TAKEN, EVICTED, PUBLICATIONS, REVIVED = 0, 1, 2, 3, 4, 5
"""Places in `BlockPool.counters`: blocks on the free list; those of them with a published key; and,
since the start, blocks handed out, cached blocks lost to that, keys published, and cached blocks
taken off the free list by a hit."""


class BlockPool(NamedTuple):
    """Columns over blocks; entry `num_blocks` of the links is the two ends of the free list."""

    ref_count: NDArray[np.int32]  # [num_blocks], block-table entries that name the block
    next_free: NDArray[np.int32]  # [num_blocks + 1]
    previous_free: NDArray[np.int32]  # [num_blocks + 1]
    key: NDArray[np.uint64]  # [num_blocks, 2]
    key_state: NDArray[np.int8]  # [num_blocks]
    key_index: NDArray[np.int32]  # [capacity], see prefix_cache
    counters: NDArray[np.int64]  # [6]


def make_pool(num_blocks: int) -> BlockPool:
    """A pool whose blocks are all free and are handed out in order from 0."""
    ends = num_blocks
    pool = BlockPool(
        ref_count=np.zeros(num_blocks, dtype=np.int32),
        next_free=np.arange(1, num_blocks + 2, dtype=np.int32),
        previous_free=np.arange(-1, num_blocks, dtype=np.int32),
        key=np.zeros((num_blocks, 2), dtype=np.uint64),
        key_state=np.zeros(num_blocks, dtype=np.int8),
        key_index=np.zeros(_index_capacity(num_blocks), dtype=np.int32),
        counters=np.zeros(6, dtype=np.int64),
    )
    pool.next_free[ends] = 0
    pool.previous_free[0] = ends
    pool.counters[FREE] = num_blocks
    return pool


def _index_capacity(num_blocks: int) -> int:
    capacity = 8
    while capacity < 8 * num_blocks:
        capacity *= 2
    return capacity
