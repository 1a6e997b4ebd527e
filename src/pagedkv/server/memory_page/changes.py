"""What is different in the memory since it was last looked at.

A `Differ` keeps what it has told: for each block its users, the state and the beginning of its
key, its place in the order of eviction; each row of the block tables; each sequence. One look
compares that with the arrays of the scheduler, in compiled loops, and tells the rows that differ.
Whoever applies all of them, from the first look on, has the whole; so has who is told `whole` and
what comes after it.

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
from pagedkv.scheduling.queues import (
    RUNNING_SIZE,
    WAITING_HEAD,
    WAITING_SIZE,
    Queues,
    Sequences,
)
from pagedkv.server.memory_page.names import Names, make_names, name_of, with_room

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


_RUN = 256
"""Blocks that are compared at once; few of such runs have one that differs."""


class _Told(NamedTuple):
    """What has been told."""

    blocks: NDArray[np.uint32]  # [num_blocks, 6]
    users: NDArray[np.int32]  # [num_blocks], as in `blocks`, and packed for the comparison
    key_state: NDArray[np.int8]  # [num_blocks], likewise
    changed: NDArray[np.int64]  # [num_blocks], the look in which the block last differed
    entries: NDArray[np.int32]  # [num_rows, width]
    held: NDArray[np.int64]  # [num_rows], entries of the row
    counters: NDArray[np.int64]  # [6], those of the pool
    last_order: NDArray[np.int64]  # [1]
    sequences: NDArray[np.int32]  # [num_columns, 9]


class Differ:
    """Compares the memory of one scheduler with what was told of it before."""

    def __init__(self, arrays: SchedulerArrays) -> None:
        pool, tables = arrays.memory
        num_blocks = len(pool.ref_count)
        blocks = np.zeros((num_blocks, len(BLOCK_FIELDS)), dtype=np.uint32)
        blocks[:, 0] = np.arange(num_blocks)
        none = np.zeros((0, len(SEQUENCE_FIELDS)), dtype=np.int32)
        self._told = _Told(
            blocks=blocks,
            users=np.zeros(num_blocks, dtype=np.int32),
            key_state=np.zeros(num_blocks, dtype=np.int8),
            changed=np.zeros(num_blocks, dtype=np.int64),
            entries=np.full_like(tables.entries, NO_BLOCK),
            held=np.zeros(len(tables.num_tokens), dtype=np.int64),
            counters=np.zeros(len(pool.counters), dtype=np.int64),
            last_order=np.zeros(1, dtype=np.int64),
            sequences=none,
        )
        # As large as they may come to be; the system gives what was written to.
        self._room = Changes(
            blocks=np.empty_like(blocks),
            tables=np.empty((tables.entries.size, len(TABLE_FIELDS)), dtype=np.int32),
            sequences=none,
        )
        self._names = make_names()
        self._num_looks = 0

    def look(self, arrays: SchedulerArrays, *, block_size: int, now_ms: int) -> Changes:
        """What is different; `now_ms` above 0. Cost: one pass over blocks and table entries."""
        self._num_looks += 1
        names, room = self.names(arrays), self._room
        n, m, k = _look(
            arrays.memory,
            arrays.sequences,
            arrays.queues,
            arrays.is_alive,
            arrays.generation,
            names,
            self._told,
            block_size,
            now_ms if self._num_looks > 1 else 0,
            self._num_looks,
            room,
        )
        sequences = room.sequences[:k]
        by_name = sequences[:, 1].argsort(kind="stable")
        return Changes(room.blocks[:n].copy(), room.tables[:m].copy(), sequences[by_name])

    def whole(self) -> Changes:
        """All that was told so far, as changes to blocks that are free and to no sequences."""
        told = self._told
        rows, logical_blocks = np.nonzero(told.entries != NO_BLOCK)
        tables = np.empty((len(rows), len(TABLE_FIELDS)), dtype=np.int32)
        tables[:, 0], tables[:, 1] = rows, logical_blocks
        tables[:, 2] = told.entries[rows, logical_blocks]
        alive = told.sequences[told.sequences[:, 1] > 0]
        return Changes(
            blocks=told.blocks[told.blocks[:, 1:].any(1)],
            tables=tables,
            sequences=alive[alive[:, 1].argsort(kind="stable")],
        )

    def names(self, arrays: SchedulerArrays) -> Names:
        """The names given so far, with room for every column there is; to be used at once."""
        num_columns = len(arrays.generation)
        first = len(self._names.name)
        if num_columns > first:
            self._names = with_room(self._names, num_columns)
            more = np.zeros((num_columns - first, len(SEQUENCE_FIELDS)), dtype=np.int32)
            more[:, 0] = np.arange(first, num_columns)
            sequences = np.concatenate([self._told.sequences, more])
            self._told = self._told._replace(sequences=sequences)
            self._room = self._room._replace(sequences=np.empty_like(sequences))
        return self._names


@compiled_in_place
def _look(
    memory: Memory,
    sequences: Sequences,
    queues: Queues,
    is_alive: NDArray[np.bool_],
    generation: NDArray[np.int64],
    names: Names,
    told: _Told,
    block_size: int,
    since_ms: int,
    look: int,
    changes: Changes,
) -> tuple[int, int, int]:
    """Write all rows that differ into `changes`; returns how many, of each of its arrays."""
    num_entries = _note_tables(memory.tables, told, block_size, changes.tables)
    num_blocks = _note_blocks(memory, told, since_ms, look, changes.blocks)
    _name_all(queues, is_alive, generation, names)
    num_sequences = _note_sequences(
        sequences, memory.tables.num_computed, is_alive, names, told.sequences, changes.sequences
    )
    return num_blocks, num_entries, num_sequences


@compiled_in_place
def _name_all(
    queues: Queues, is_alive: NDArray[np.bool_], generation: NDArray[np.int64], names: Names
) -> None:
    """Name those that have no name: first who runs, then who waits, then all others."""
    for i in range(queues.counters[RUNNING_SIZE]):
        column = queues.running[i]
        name_of(names, column, generation[column])
    for i in range(queues.counters[WAITING_SIZE]):
        column = queues.waiting[(queues.counters[WAITING_HEAD] + i) % len(queues.waiting)]
        name_of(names, column, generation[column])
    for column in range(len(is_alive)):
        if is_alive[column]:
            name_of(names, column, generation[column])


@compiled_in_place
def _note_blocks(
    memory: Memory,
    told: _Told,
    since_ms: int,
    look: int,
    changes: NDArray[np.uint32],
) -> int:
    """Write the rows of blocks that differ into `changes`; returns how many.

    Tables have been noted.
    """
    pool = memory.pool
    count = 0
    for first in range(0, len(told.users), _RUN):
        if _is_as_told(pool, told, first):
            continue
        for block in range(first, min(first + _RUN, len(told.users))):
            is_other = pool.ref_count[block] != told.users[block]
            if is_other or pool.key_state[block] != told.key_state[block]:
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


@compiled_inline
def _is_as_told(pool: BlockPool, told: _Told, first: int) -> bool:
    """Whether `_RUN` blocks from `first` on have the users and states of keys that were told.

    A loop that only gathers, over slices, is one that the processor does many blocks at a time.
    """
    users, told_users = pool.ref_count[first : first + _RUN], told.users[first : first + _RUN]
    states, told_states = (
        pool.key_state[first : first + _RUN],
        told.key_state[first : first + _RUN],
    )
    differs = 0
    for i in range(len(users)):
        differs |= users[i] ^ told_users[i]
    for i in range(len(states)):
        differs |= states[i] ^ told_states[i]
    return differs == 0


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
    names: Names,
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
            now[1] = names.name[column]
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
