"""What the kernels of attention are given: which array stands where, and room to work in."""

from __future__ import annotations

import numpy as np

from pagedkv.attention.vector_code import HOST_LANES, LANE_VECTORS

(NEXT, THREADS, FIRST_LEADER) = range(3)
"""Places in the counters: the next piece to take, threads so far, then one for each piece's parts.
"""

FEW_CHUNK = 32
"""Tokens whose scores are made before their values are read.

While the keys, then the values, of one chunk are used, those of the next are asked for: long enough
ahead for memory to answer, few enough for the second level of the cache to hold."""

MANY_CHUNK = 96
"""Tokens that are gathered at once for many queries; a multiple of `LANE_ROWS`."""

WIDTH = HOST_LANES * LANE_VECTORS
"""Queries in a panel."""

NOTHING = np.float32(-1e30)
"""Below every score, and finite: of two infinities there is no difference."""

(
    PAGE_NUMBERS,
    BLOCK_SIZE,
    KEYS,
    VALUES,
    TOKEN_STRIDE,
    HEAD_STRIDE,
    OUT_TOKEN_STRIDE,
    OUT_HEAD_STRIDE,
    WINDOW,
    CHUNK,
    SCRATCH_EACH,
    NUM_INTEGERS,
) = range(12)
"""Places in the integers that a kernel is given."""


def num_scratch(heads: int, most_rows: int, key_dim: int, value_dim: int) -> int:
    """Floats that one thread needs for pieces of up to `most_rows` rows."""
    floats = value_dim + heads * (key_dim + value_dim + FEW_CHUNK + 3)
    if most_rows > heads or most_few(heads) == 0:
        width = -(-most_rows // WIDTH) * WIDTH
        floats = value_dim + width * (key_dim + value_dim + 2)
        floats += MANY_CHUNK * (key_dim + value_dim + WIDTH) + WIDTH
    return -(-floats // 16) * 16  # whole lines of the cache, for each thread its own


NUM_ROWS_OF_SCRATCH = 4 * max(FEW_CHUNK, MANY_CHUNK)
"""Places of rows that one thread needs."""


def most_few(heads: int) -> int:
    """Up to how many rows of a KV head are few; more fill the lanes of a vector better."""
    return heads * max(1, 8 // heads) if heads <= 8 else 0


(STORAGE, Q, OUT, TABLES, LENGTHS, STARTS, PIECES, COUNTERS) = range(8)
(PARTS_KEPT, SINKS, INTEGERS, FACTORS, SCRATCH, ROWS) = range(8, 14)
"""The arrays that a kernel takes, in their order. Of each, a task is told address and size."""

TABLE_WIDTH = 2 * (ROWS + 1)
NUM_NUMBERS = TABLE_WIDTH + 1
"""Numbers of a task: those of the arrays, then the width of the block tables."""
