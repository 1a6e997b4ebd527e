"""Blocks for one sequence: admitted, grown, committed, forked, released.

Every function here assumes that its caller has counted first: what is needed and what is
available is one computation, and only when it is enough is anything changed.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pagedkv.compiling import compiled_in_place, compiled_inline
from pagedkv.memory import block_pool, block_table, copy_on_write, prefix_cache
from pagedkv.memory.block_table import NO_BLOCK, BlockTables, blocks_for, make_tables
from pagedkv.memory.blocks import NO_KEY, PUBLISHED, BlockPool, make_pool

AHEAD = 16
"""How many blocks ahead of a loop the index is told of what comes."""


class Memory(NamedTuple):
    """The blocks and who has them: all the state there is."""

    pool: BlockPool
    tables: BlockTables


def make_memory(num_blocks: int, num_rows: int, width: int) -> Memory:
    """A memory of `num_blocks` free blocks, and tables for `num_rows` rows of `width` blocks."""
    return Memory(make_pool(num_blocks), make_tables(num_rows, width))


@compiled_in_place
def find_prefix(
    pool: BlockPool,
    keys: NDArray[np.uint64],
    num_tokens: int,
    block_size: int,
    found: NDArray[np.int32],
) -> tuple[int, int]:
    """Look up the cached prefix of a sequence of `num_tokens` tokens.

    `keys` uint64 [k, 2] are the keys of its first full blocks. Writes the blocks found into
    `found` int32 and returns how many there are, and how many of them are free (cached): those
    are not available to the same call again. Changes nothing else. At most
    `(num_tokens - 1) // block_size` blocks hit, since the last token's logits must be computed.
    """
    limit = min(len(keys), (num_tokens - 1) // block_size)
    num_free = 0
    for i in range(limit):
        if i + AHEAD < limit:
            prefix_cache.expect(pool, keys[i + AHEAD, 0])
        block = prefix_cache.find(pool, keys[i, 0], keys[i, 1])
        if block < 0:
            return i, num_free
        found[i] = block
        if pool.ref_count[block] == 0:
            num_free += 1
    return limit, num_free


@compiled_in_place
def count_distinct(pool: BlockPool, found: NDArray[np.int32], num_hits: int) -> tuple[int, int]:
    """How many of the first hits are different blocks, and how many of those are free.

    Keys of the caller's own making may name one block twice, but a block has one place in a
    sequence: from its second on, nothing hits. Each block is marked while counting, and all are
    published again before this returns.
    """
    num_distinct, num_free = 0, 0
    while num_distinct < num_hits and pool.key_state[found[num_distinct]] == PUBLISHED:
        pool.key_state[found[num_distinct]] = NO_KEY
        if pool.ref_count[found[num_distinct]] == 0:
            num_free += 1
        num_distinct += 1
    for i in range(num_distinct):
        pool.key_state[found[i]] = PUBLISHED
    return num_distinct, num_free


@compiled_in_place
def share_prefix(
    memory: Memory, row: int, found: NDArray[np.int32], num_hits: int, block_size: int
) -> None:
    """Begin the table of a fresh row with the first `num_hits` blocks that `find_prefix` found."""
    for i in range(num_hits):
        block_pool.share(memory.pool, int(found[i]))
        memory.tables.entries[row, i] = found[i]
    memory.tables.num_tokens[row] = num_hits * block_size
    memory.tables.num_computed[row] = num_hits * block_size


@compiled_in_place
def blocks_to_grow(memory: Memory, row: int, num_new: int, block_size: int) -> int:
    """Blocks that must be taken before `num_new` tokens more can be written, a copy included."""
    num_tokens = memory.tables.num_tokens[row]
    tail = num_tokens // block_size  # divisions are most of what this costs: one is enough
    in_tail = num_tokens - tail * block_size
    if in_tail == 0 or num_new == 0:
        return blocks_for(num_new, block_size)
    needed = 1 if memory.pool.ref_count[memory.tables.entries[row, tail]] > 1 else 0
    if num_new > block_size - in_tail:
        needed += blocks_for(num_new - (block_size - in_tail), block_size)
    return needed


@compiled_inline
def grow(
    memory: Memory,
    row: int,
    num_new: int,
    block_size: int,
    copies: NDArray[np.int32],
    num_copies: int,
) -> int:
    """Give `num_new` tokens more a slot each, copying a shared tail first.

    A copy is noted in `copies` int32 [>num_copies, 2] as (from, to); returns their new number.
    """
    pool, tables = memory.pool, memory.tables
    num_tokens = tables.num_tokens[row]
    tables.num_tokens[row] = num_tokens + num_new
    tail = num_tokens // block_size
    room = 0
    if tail * block_size < num_tokens and num_new > 0:
        if copy_on_write.replace_if_shared(pool, tables, row, tail, copies, num_copies):
            num_copies += 1
        room = (tail + 1) * block_size - num_tokens
        tail += 1
    ahead = block_pool.nth_free(pool, AHEAD) if num_new - room > block_size else -1
    while room < num_new:
        if ahead >= 0:
            ahead = block_pool.expect_eviction(pool, ahead)
        tables.entries[row, tail] = block_pool.take(pool)
        room += block_size
        tail += 1
    return num_copies


@compiled_in_place
def await_keys(
    memory: Memory, row: int, start: int, stop: int, keys: NDArray[np.uint64], block_size: int
) -> None:
    """Note the keys of the blocks that tokens `start` to `stop` fill; `keys[i]` is block `i`'s."""
    for i in range(start // block_size, min(stop // block_size, len(keys))):
        block = int(memory.tables.entries[row, i])
        block_pool.await_key(memory.pool, block, keys[i, 0], keys[i, 1])


@compiled_in_place
def commit(memory: Memory, row: int, num_computed: int, block_size: int) -> None:
    """The first `num_computed` tokens' K and V are in the blocks now: publish what that fills."""
    tables = memory.tables
    end = num_computed // block_size
    for i in range(tables.num_computed[row] // block_size, end):
        if i + AHEAD < end:
            block_pool.expect_publication(memory.pool, int(tables.entries[row, i + AHEAD]))
        block_pool.publish(memory.pool, int(tables.entries[row, i]))
    tables.num_computed[row] = num_computed


@compiled_in_place
def fork(memory: Memory, row: int) -> int:
    """A new row that shares every block of `row`; the caller has made sure one is free."""
    tables = memory.tables
    child = block_table.take_row(tables)
    i = 0
    while i < tables.entries.shape[1] and tables.entries[row, i] != NO_BLOCK:
        block = tables.entries[row, i]
        block_pool.share(memory.pool, int(block))
        tables.entries[child, i] = block
        i += 1
    tables.num_tokens[child] = tables.num_tokens[row]
    tables.num_computed[child] = tables.num_computed[row]
    return child


@compiled_in_place
def release(memory: Memory, row: int, block_size: int) -> None:
    """Give back the blocks and the row: deepest block first, so a chain loses its tail first."""
    tables = memory.tables
    for i in range(blocks_for(tables.num_tokens[row], block_size) - 1, -1, -1):
        block_pool.release(memory.pool, int(tables.entries[row, i]))
        tables.entries[row, i] = NO_BLOCK
    block_table.return_row(tables, row)
