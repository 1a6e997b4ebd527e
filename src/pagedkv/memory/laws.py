"""The laws of the memory, each with its number, and the check that recomputes all of them.

1. Each block is in exactly one place: once on the free list, or in tables.
2. A block's reference count is the number of block-table entries that name it.
3. The index finds a block exactly if its key is published, and finds it under its own key.
4. A sequence of n tokens has ceil(n / block_size) blocks, and its row holds nothing behind them.
5. used + cached + free = all, and the counters say what a recount says.
6. A key is pending only while its block is in use and no user has computed it; on the free list
   blocks without a key come before cached ones.
7. Computed tokens have slots, and a row is either a sequence's or free, never both.
8. A partial block has one length: sequences that share it hold equally many tokens.
"""

from __future__ import annotations

import numpy as np

from pagedkv.memory import prefix_cache
from pagedkv.memory.allocation import Memory
from pagedkv.memory.block_table import FREE_ROW, NO_BLOCK
from pagedkv.memory.blocks import CACHED, FREE, NO_KEY, PENDING, PUBLISHED


def broken_laws(memory: Memory, block_size: int) -> list[str]:
    """Every law that does not hold, as lines that begin with its number; empty if all hold.

    Trusts no cached figure. Costs one pass over blocks, index and tables.
    """
    pool, tables = memory
    num_blocks = len(pool.ref_count)
    broken: list[str] = []

    order, fault = _free_list(memory)
    if fault:
        broken.append(f"law 1: the free list {fault}")
    listed = np.zeros(num_blocks, dtype=bool)
    listed[order] = True

    entries = tables.entries[tables.entries != NO_BLOCK]
    if len(entries) and (entries.min() < 0 or entries.max() >= num_blocks):
        return [*broken, "law 1: a block table names a block that does not exist"]
    users = np.bincount(entries, minlength=num_blocks)
    _each(broken, np.flatnonzero(listed & (users > 0)), "law 1: free and in a table: block")
    _each(broken, np.flatnonzero(~listed & (users == 0)), "law 1: in no place: block")
    _each(broken, np.flatnonzero(users != pool.ref_count), "law 2: wrong count: block")

    indexed = np.sort(pool.key_index[pool.key_index != 0] - 1)
    published = np.flatnonzero(pool.key_state == PUBLISHED)
    if not np.array_equal(indexed, published):
        broken.append("law 3: the blocks in the index are not the published ones")
    lost = [b for b in published if prefix_cache.find(pool, pool.key[b, 0], pool.key[b, 1]) != b]
    _each(broken, np.array(lost, dtype=np.int64), "law 3: not found under its key: block")

    alive = tables.num_tokens != FREE_ROW
    held = np.where(alive, -(-tables.num_tokens // block_size), 0)
    filled = tables.entries != NO_BLOCK
    expected = np.arange(tables.entries.shape[1]) < held[:, None]
    fits = (filled == expected).all(axis=1) & (held >= 0) & (held <= tables.entries.shape[1])
    _each(broken, np.flatnonzero(~fits), "law 4: wrong table: row")

    num_free, num_cached = len(order), int((pool.key_state[order] == PUBLISHED).sum())
    if num_free + int((users > 0).sum()) != num_blocks:
        broken.append("law 5: used and unused blocks are not all blocks")
    if (num_free, num_cached) != (pool.counters[FREE], pool.counters[CACHED]):
        broken.append(
            f"law 5: by the counters {pool.counters[FREE]} unused and {pool.counters[CACHED]} "
            f"cached, by a recount {num_free} and {num_cached}"
        )

    state = pool.key_state[order]
    _each(broken, order[state == PENDING], "law 6: a key is pending on a free block: block")
    computed = np.where(alive & fits, np.minimum(tables.num_computed // block_size, held), 0)
    done = tables.entries[np.arange(tables.entries.shape[1]) < computed[:, None]]
    late = np.unique(done[pool.key_state[done] == PENDING])
    _each(broken, late, "law 6: a key is pending on a computed block: block")
    keyless = np.flatnonzero(state == NO_KEY)
    cached = np.flatnonzero(state == PUBLISHED)
    if len(keyless) and len(cached) and keyless[-1] > cached[0]:
        broken.append("law 6: a cached block would be lost before a useless one")

    ahead = alive & ((tables.num_computed > tables.num_tokens) | (tables.num_computed < 0))
    _each(broken, np.flatnonzero(ahead), "law 7: not 0 to all of its tokens are computed: row")
    free_rows = np.sort(tables.free_rows[: tables.num_free_rows[0]])
    if not np.array_equal(free_rows, np.flatnonzero(~alive)):
        broken.append("law 7: the free rows are not the rows of no sequence")

    partial = np.flatnonzero(fits & alive & (tables.num_tokens % block_size != 0))
    lengths = tables.num_tokens[partial]
    tails = tables.entries[partial, lengths // block_size]
    agreed, sharers = np.unique(np.stack([tails, lengths]), axis=1, return_counts=True)
    unequal = np.unique(agreed[0][users[agreed[0]] != sharers])
    _each(broken, unequal, "law 8: shared by sequences of other lengths: block")
    return broken


def _free_list(memory: Memory) -> tuple[np.ndarray[tuple[int], np.dtype[np.int64]], str]:
    """The blocks on the free list, head to tail, and what is wrong with its links if anything."""
    pool = memory.pool
    ends = len(pool.ref_count)
    order: list[int] = []
    before, block = ends, int(pool.next_free[ends])
    fault = ""
    while block != ends:
        if not 0 <= block < ends:
            fault = f"leads to block {block}"
            break
        if pool.previous_free[block] != before:
            fault = f"is not linked back from block {block}"
            break
        order.append(block)  # never twice: it would have to be linked back to two blocks
        before, block = block, int(pool.next_free[block])
    if not fault and pool.previous_free[ends] != before:
        fault = "does not end where its tail is"
    return np.array(order, dtype=np.int64), fault


def _each(broken: list[str], faults: np.ndarray[tuple[int], np.dtype[np.int64]], law: str) -> None:
    if len(faults):
        shown = ", ".join(str(fault) for fault in faults[:8])
        more = f" and {len(faults) - 8} more" if len(faults) > 8 else ""
        broken.append(f"{law} {shown}{more}")
