"""What is different in the memory since it was last looked at.

A `Differ` keeps what it has told: for each block its users, the state and the beginning of its
key, its place in the order of eviction; each row of the block tables; each sequence. One look
compares that with the arrays of the scheduler, in compiled loops, and tells the rows that differ.
Whoever applies all of them, from the first look on, has the whole (`picture`).

The engine waits for a look, so it reads little: of most blocks only how many use them and the
state of their keys. A block in the same state as before can have another key only if it was handed
out since, and then it is in a table, or has been released and is among the last on the free list.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pagedkv.compiling import compiled_in_place, compiled_inline
from pagedkv.memory.allocation import Memory
from pagedkv.memory.block_table import NO_BLOCK, BlockTables, blocks_for
from pagedkv.memory.blocks import (
    CACHED,
    EVICTED,
    NO_KEY,
    PUBLICATIONS,
    PUBLISHED,
    REVIVED,
    BlockPool,
)
from pagedkv.scheduling.continuous import SchedulerArrays
from pagedkv.scheduling.queues import RUNNING_SIZE, WAITING_HEAD, WAITING_SIZE, Sequences

BLOCK_FIELDS = ("block", "users", "key_state", "key", "order", "since_ms")
"""Of a row of `Changes.blocks`: users is its reference count; key the first 32 bits of its key;
order 0, or for a cached block its place in the order of release, by which it will be evicted;
since_ms when it came to be as it is, or 0 where nobody was looking then."""

TABLE_FIELDS = ("row", "logical_block", "block")
"""Of a row of `Changes.tables`; block is -1 where the table ends before."""

SEQUENCE_FIELDS = (
    "column",
    "name",
    "state",
    "row",
    "prompt_tokens",
    "num_tokens",
    "num_computed",
    "total_tokens",
    "num_admissions",
)
"""Of a row of `Changes.sequences`; name counts sequences from 1, and is 0 where the column is
nobody's any more; total_tokens is the most that it may come to."""


class Changes(NamedTuple):
    """Rows that are different, each with its place first. uint32, int32 and int32."""

    blocks: NDArray[np.uint32]
    """[n, 6], see `BLOCK_FIELDS`."""
    tables: NDArray[np.int32]
    """[m, 3], see `TABLE_FIELDS`."""
    sequences: NDArray[np.int32]
    """[k, 9], see `SEQUENCE_FIELDS`; ascending by name, those that ended first."""


class _Told(NamedTuple):
    """What has been told of blocks and tables."""

    blocks: NDArray[np.uint32]  # [num_blocks, 6]
    users: NDArray[np.int32]  # [num_blocks], as in `blocks`, and packed for the comparison
    key_state: NDArray[np.int8]  # [num_blocks], likewise
    changed: NDArray[np.int64]  # [num_blocks], the look in which the block last differed
    entries: NDArray[np.int32]  # [num_rows, width]
    held: NDArray[np.int64]  # [num_rows], entries of the row
    counters: NDArray[np.int64]  # [6], those of the pool
    last_order: NDArray[np.int64]  # [1]


class Differ:
    """Compares the memory of one scheduler with what was told of it before."""

    def __init__(self, arrays: SchedulerArrays) -> None:
        pool, tables = arrays.memory
        num_blocks = len(pool.ref_count)
        blocks = np.zeros((num_blocks, len(BLOCK_FIELDS)), dtype=np.uint32)
        blocks[:, 0] = np.arange(num_blocks)
        self._told = _Told(
            blocks=blocks,
            users=np.zeros(num_blocks, dtype=np.int32),
            key_state=np.zeros(num_blocks, dtype=np.int8),
            changed=np.zeros(num_blocks, dtype=np.int64),
            entries=np.full_like(tables.entries, NO_BLOCK),
            held=np.zeros(len(tables.num_tokens), dtype=np.int64),
            counters=np.zeros(len(pool.counters), dtype=np.int64),
            last_order=np.zeros(1, dtype=np.int64),
        )
        # As large as they may come to be; the system gives what was written to.
        self._changed_blocks = np.empty_like(blocks)
        self._changed_entries = np.empty((tables.entries.size, len(TABLE_FIELDS)), dtype=np.int32)
        self._changed_sequences = np.zeros((0, len(SEQUENCE_FIELDS)), dtype=np.int32)
        self._sequences = np.zeros((0, len(SEQUENCE_FIELDS)), dtype=np.int32)
        self._names = np.zeros(0, dtype=np.int32)  # of each column
        self._named = np.zeros(0, dtype=np.int64)  # its generation when it was named
        self._num_named = 0
        self._num_looks = 0

    def look(self, arrays: SchedulerArrays, *, block_size: int, now_ms: int) -> Changes:
        """What is different; `now_ms` above 0. Cost: one pass over blocks and table entries."""
        self._num_looks += 1
        since_ms = now_ms if self._num_looks > 1 else 0
        pool, tables = arrays.memory
        told, blocks, entries = self._told, self._changed_blocks, self._changed_entries
        others = np.flatnonzero((pool.ref_count != told.users) | (pool.key_state != told.key_state))
        m = _note_tables(tables, told, block_size, entries)
        n = _note_blocks(arrays.memory, told, others, since_ms, self._num_looks, blocks)
        return Changes(blocks[:n].copy(), entries[:m].copy(), self._note_sequences(arrays))

    def name_of(self, arrays: SchedulerArrays, column: int) -> int:
        """The name of the sequence that has `column`: a number, in the order of coming."""
        self._make_room(len(arrays.generation))
        if self._named[column] != arrays.generation[column]:
            self._num_named += 1
            self._names[column] = self._num_named
            self._named[column] = arrays.generation[column]
        return int(self._names[column])

    def _make_room(self, num_columns: int) -> None:
        missing = num_columns - len(self._names)
        if missing > 0:
            self._names = np.concatenate([self._names, np.zeros(missing, dtype=np.int32)])
            self._named = np.concatenate([self._named, np.full(missing, -1)])
            more = np.zeros((missing, len(SEQUENCE_FIELDS)), dtype=np.int32)
            more[:, 0] = np.arange(num_columns - missing, num_columns)
            self._sequences = np.concatenate([self._sequences, more])
            self._changed_sequences = np.empty_like(self._sequences)

    def _note_sequences(self, arrays: SchedulerArrays) -> NDArray[np.int32]:
        self._make_room(len(arrays.is_alive))
        if (arrays.is_alive & (self._named != arrays.generation)).any():
            for column in _by_coming(arrays):
                self.name_of(arrays, column)
        rows = self._changed_sequences
        num_computed = arrays.memory.tables.num_computed
        count = _note_sequences(
            arrays.sequences, num_computed, arrays.is_alive, self._names, self._sequences, rows
        )
        changed: NDArray[np.int32] = rows[:count][np.argsort(rows[:count, 1], kind="stable")]
        return changed


def _by_coming(arrays: SchedulerArrays) -> list[int]:
    """The columns that are somebody's: those that run, those that wait, all others."""
    counters = arrays.queues.counters
    running = arrays.queues.running[: counters[RUNNING_SIZE]].tolist()
    places = counters[WAITING_HEAD] + np.arange(counters[WAITING_SIZE])
    waiting = arrays.queues.waiting[places % len(arrays.queues.waiting)].tolist()
    return list(dict.fromkeys([*running, *waiting, *np.flatnonzero(arrays.is_alive).tolist()]))


@compiled_in_place
def _note_blocks(
    memory: Memory,
    told: _Told,
    others: NDArray[np.int64],
    since_ms: int,
    look: int,
    changes: NDArray[np.uint32],
) -> int:
    """Write the rows of blocks that differ into `changes`; returns how many.

    `others` have other users, or another state of the key. Tables have been noted.
    """
    pool = memory.pool
    count = 0
    for block in others:
        count = _note_block(pool, told, block, since_ms, look, changes, count)
    for row in range(len(told.held)):
        for i in range(told.held[row]):
            block = told.entries[row, i]
            if _first_of_key(pool, block) != told.blocks[block, 3]:
                count = _note_block(pool, told, block, since_ms, look, changes, count)
    count = _note_order(memory, told, since_ms, look, changes, count)
    for i in range(count):
        block = changes[i, 0]
        for field in range(told.blocks.shape[1]):
            changes[i, field] = told.blocks[block, field]
    return count


@compiled_in_place
def _note_block(
    pool: BlockPool,
    told: _Told,
    block: int,
    since_ms: int,
    look: int,
    changes: NDArray[np.uint32],
    count: int,
) -> int:
    """Note one block that differs, which is not among the first `count` changes."""
    users, key_state, key = pool.ref_count[block], pool.key_state[block], _first_of_key(pool, block)
    if (users > 0) != (told.users[block] > 0) or key != told.blocks[block, 3]:
        told.blocks[block, 5] = since_ms
    told.users[block] = told.blocks[block, 1] = users
    told.key_state[block] = told.blocks[block, 2] = key_state
    told.blocks[block, 3] = key
    if users > 0 or key_state != PUBLISHED:
        told.blocks[block, 4] = 0
    told.changed[block] = look
    changes[count, 0] = block
    return count + 1


@compiled_inline
def _first_of_key(pool: BlockPool, block: int) -> np.uint32:
    """The first 32 bits of a block's key; 0 where it has none."""
    if pool.key_state[block] == NO_KEY:
        return np.uint32(0)
    return np.uint32(pool.key[block, 0] >> np.uint64(32))


@compiled_in_place
def _note_order(
    memory: Memory,
    told: _Told,
    since_ms: int,
    look: int,
    changes: NDArray[np.uint32],
    count: int,
) -> int:
    """Number the blocks that were released since the last look, in the order of their release.

    Released ones are behind all others on the free list. From its tail no more than could have
    come are looked at: those that are cached more, and in place of which others went. Of these the
    key is compared too.
    """
    pool = memory.pool
    ends = len(pool.ref_count)
    most = 0
    for counter in (CACHED, EVICTED, REVIVED, PUBLICATIONS):
        most += pool.counters[counter] - told.counters[counter]
    for counter in range(len(pool.counters)):
        told.counters[counter] = pool.counters[counter]
    first = ends
    for _ in range(most):
        before = pool.previous_free[first]
        if before == ends or pool.key_state[before] != PUBLISHED:
            break
        first = before
    # One that was cached already and is numbered below who stands before it was released anew.
    last = np.int64(0)
    if first != ends and pool.previous_free[first] != ends:
        last = np.int64(told.blocks[pool.previous_free[first], 4])
    while first != ends:
        key = _first_of_key(pool, first)
        is_released = told.blocks[first, 4] <= last
        if is_released:
            told.last_order[0] += 1
            told.blocks[first, 4] = told.last_order[0]
        if is_released or key != told.blocks[first, 3]:
            told.blocks[first, 3] = key
            told.blocks[first, 5] = since_ms
            if told.changed[first] != look:
                told.changed[first] = look
                changes[count, 0] = first
                count += 1
        last = np.int64(told.blocks[first, 4])
        first = pool.next_free[first]
    return count


@compiled_in_place
def _note_tables(
    tables: BlockTables, told: _Told, block_size: int, changes: NDArray[np.int32]
) -> int:
    """Write the table entries that differ into `changes`; returns how many."""
    count = 0
    for row in range(len(tables.num_tokens)):
        held = blocks_for(max(tables.num_tokens[row], 0), block_size)
        for i in range(max(held, told.held[row])):
            block = tables.entries[row, i] if i < held else NO_BLOCK
            if block != told.entries[row, i]:
                changes[count, 0] = row
                changes[count, 1] = i
                changes[count, 2] = block
                told.entries[row, i] = block
                count += 1
        told.held[row] = held
    return count


@compiled_in_place
def _note_sequences(
    sequences: Sequences,
    num_computed: NDArray[np.int64],
    is_alive: NDArray[np.bool_],
    names: NDArray[np.int32],
    told: NDArray[np.int32],
    changes: NDArray[np.int32],
) -> int:
    """Write the rows of sequences that differ from `told` into both; returns how many."""
    count = 0
    for column in range(len(is_alive)):
        now = changes[count]
        now[0] = column
        for field in range(1, len(now)):
            now[field] = 0
        if is_alive[column]:
            row = sequences.row[column]
            now[1] = names[column]
            now[2] = sequences.state[column]
            now[3] = row
            now[4] = sequences.prompt_tokens[column]
            now[5] = sequences.num_tokens[column]
            now[6] = num_computed[row] if row >= 0 else 0
            now[7] = sequences.total_tokens[column]
            now[8] = sequences.num_admissions[column]
        elif told[column, 1] == 0:
            continue
        is_other = False
        for field in range(1, len(now)):
            is_other |= now[field] != told[column, field]
            told[column, field] = now[field]
        count += is_other
    return count
