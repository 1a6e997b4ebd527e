"""`extend` for many sequences at once: counted, then carried out, in one compiled call."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pagedkv.compiling import compiled, compiled_in_place
from pagedkv.memory import allocation, block_key, block_pool
from pagedkv.memory.address import write_slots
from pagedkv.memory.allocation import Memory
from pagedkv.memory.block_key import MAX_TOKEN_ID
from pagedkv.memory.block_table import blocks_for, row_of, take_row
from pagedkv.memory.blocks import FREE

OK, UNKNOWN, TWICE, OUT_OF_BLOCKS, BAD_TOKEN = 0, 1, 2, 3, 4
"""What `extend` and its like report; `Outcome` says of which sequence or how many blocks."""


class Tails(NamedTuple):
    """What is needed to name a sequence's next full block, as columns over rows."""

    parent: NDArray[np.uint64]  # [num_rows, 2], key of its last full block, or of its namespace
    token_ids: NDArray[np.int64]  # [num_rows, block_size], ids in its partial last block
    known: NDArray[np.bool_]  # [num_rows], whether the two above are: not after foreign keys


def make_tails(num_rows: int, block_size: int) -> Tails:
    """Tails for `num_rows` rows, to be filled when a row is taken."""
    return Tails(
        parent=np.zeros((num_rows, 2), dtype=np.uint64),
        token_ids=np.zeros((num_rows, block_size), dtype=np.int64),
        known=np.zeros(num_rows, dtype=np.bool_),
    )


def enlarged_tails(tails: Tails, num_rows: int) -> Tails:
    """The same tails with room for more rows."""
    old_rows, block_size = tails.token_ids.shape
    larger = make_tails(num_rows, block_size)
    for new, old in zip(larger, tails, strict=True):
        new[:old_rows] = old
    return larger


Outcome: TypeAlias = tuple[int, int, int]
"""A status; then the sequence at fault and 0, or the blocks needed and available, or the bad
token id and its place."""

Arrays: TypeAlias = tuple[
    NDArray[np.int64], NDArray[np.int32], NDArray[np.int64], NDArray[np.int64], NDArray[np.int32]
]


@compiled
def _no_arrays() -> Arrays:
    none = np.empty(0, dtype=np.int64)
    empty = np.empty((0, 0), dtype=np.int32)
    return none, empty, none, none, empty


@compiled_in_place
def _count_at_most(
    memory: Memory, rows: NDArray[np.int64], counts: NDArray[np.int64], block_size: int
) -> int:
    """No fewer blocks than extending all `rows` takes: every writer to a shared tail copies it."""
    needed = 0
    for i in range(len(rows)):
        needed += allocation.blocks_to_grow(memory, rows[i], counts[i], block_size)
    return needed


@compiled_in_place
def _count_needed(
    memory: Memory, rows: NDArray[np.int64], counts: NDArray[np.int64], block_size: int
) -> int:
    """Blocks that extending all `rows` takes, copies included.

    Several rows may write into one shared tail: all of them but the last remaining user copy.
    So each writer leaves its tail while counting, and comes back before this returns.
    """
    pool, tables = memory.pool, memory.tables
    needed = 0
    for i in range(len(rows)):
        needed += allocation.blocks_to_grow(memory, rows[i], counts[i], block_size)
        num_tokens = tables.num_tokens[rows[i]]
        if counts[i] > 0 and num_tokens % block_size != 0:
            pool.ref_count[tables.entries[rows[i], num_tokens // block_size]] -= 1
    for i in range(len(rows)):
        num_tokens = tables.num_tokens[rows[i]]
        if counts[i] > 0 and num_tokens % block_size != 0:
            pool.ref_count[tables.entries[rows[i], num_tokens // block_size]] += 1
    return needed


@compiled_in_place
def find_rows(
    memory: Memory, sequences: NDArray[np.int64], rows: NDArray[np.int64]
) -> tuple[int, int]:
    """Write the row of each sequence; returns a status and the sequence at fault.

    A sequence named twice is found by the generations: while one is checked its own is
    negative, and all are put back before this returns.
    """
    tables = memory.tables
    status, fault, checked = OK, 0, 0
    for i in range(len(sequences)):
        sequence = sequences[i]
        row = row_of(tables, sequence) if sequence >= 0 else -1
        if row < 0:
            status, fault = UNKNOWN, sequence
            for j in range(checked):
                if sequences[j] == sequence:
                    status = TWICE
            break
        rows[i] = row
        tables.generation[row] = -1 - tables.generation[row]
        checked += 1
    for i in range(checked):
        tables.generation[rows[i]] = -1 - tables.generation[rows[i]]
    return status, fault


@compiled_in_place
def widest(memory: Memory, rows: NDArray[np.int64], counts: NDArray[np.int64]) -> int:
    """The most tokens that any of `rows` has once extended."""
    most = 0
    for i in range(len(rows)):
        most = max(most, memory.tables.num_tokens[rows[i]] + counts[i])
    return most


@compiled_in_place
def note_tokens(
    memory: Memory,
    tails: Tails,
    secret: NDArray[np.uint64],
    row: int,
    token_ids: NDArray[np.int64],
    start: int,
    stop: int,
) -> None:
    """Add `token_ids[start:stop]`, for which there are slots, to the row's tail.

    Every block that they fill gets its key, to be published when they are committed.
    """
    block_size = tails.token_ids.shape[1]
    tail = tails.token_ids[row]
    position = memory.tables.num_tokens[row] - (stop - start)
    for i in range(start, stop):
        offset = position % block_size
        tail[offset] = token_ids[i]
        if offset == block_size - 1:
            key0, key1 = block_key.block_key(
                secret, tails.parent[row, 0], tails.parent[row, 1], tail, 0, block_size
            )
            tails.parent[row, 0] = key0
            tails.parent[row, 1] = key1
            block = int(memory.tables.entries[row, position // block_size])
            block_pool.await_key(memory.pool, block, key0, key1)
        position += 1


@compiled
def extend(
    memory: Memory,
    tails: Tails,
    secret: NDArray[np.uint64],
    sequences: NDArray[np.int64],
    counts: NDArray[np.int64],
    token_ids: NDArray[np.int64],
    block_size: int,
    caching: bool,
) -> tuple[Outcome, Arrays]:
    """Give every sequence its new tokens' slots: all of them or none.

    `token_ids` holds the new tokens of all, one sequence after the other. Returns slots,
    block tables, lengths, query starts and copies; see `manager.Step`.
    """
    rows = np.empty(len(sequences), dtype=np.int64)
    status, fault = find_rows(memory, sequences, rows)
    if status != OK:
        return (status, fault, 0), _no_arrays()
    for i in range(len(token_ids)):
        if token_ids[i] < 0 or token_ids[i] > MAX_TOKEN_ID:
            return (BAD_TOKEN, token_ids[i], i), _no_arrays()
    available = memory.pool.counters[FREE]
    needed = _count_at_most(memory, rows, counts, block_size)
    if needed > available:
        needed = _count_needed(memory, rows, counts, block_size)
    if needed > available:
        return (OUT_OF_BLOCKS, needed, available), _no_arrays()
    slots = np.empty(len(token_ids), dtype=np.int64)
    lengths = np.empty(len(rows), dtype=np.int64)
    query_starts = np.empty(len(rows) + 1, dtype=np.int64)
    width = blocks_for(widest(memory, rows, counts), block_size)
    block_tables = np.empty((len(rows), width), dtype=np.int32)
    copies = np.empty((len(rows), 2), dtype=np.int32)
    arrays = (slots, block_tables, lengths, query_starts, copies)
    num_copies = _carry_out(memory, tails, secret, rows, counts, token_ids, caching, arrays)
    return (OK, needed, available), (*arrays[:4], copies[:num_copies])


@compiled_in_place
def _carry_out(
    memory: Memory,
    tails: Tails,
    secret: NDArray[np.uint64],
    rows: NDArray[np.int64],
    counts: NDArray[np.int64],
    token_ids: NDArray[np.int64],
    caching: bool,
    arrays: Arrays,
) -> int:
    """Grow every row, for which there are blocks, and fill `arrays`; returns the copies made."""
    slots, block_tables, lengths, query_starts, copies = arrays
    entries = memory.tables.entries
    block_size = tails.token_ids.shape[1]
    num_copies = 0
    position = 0
    for i in range(len(rows)):
        row, count = rows[i], counts[i]
        start = memory.tables.num_tokens[row]
        num_copies = allocation.grow(memory, row, count, block_size, copies, num_copies)
        write_slots(entries, row, start, start + count, block_size, slots, position)
        if caching and tails.known[row]:
            note_tokens(memory, tails, secret, row, token_ids, position, position + count)
        query_starts[i] = position
        lengths[i] = start + count
        position += count
        for j in range(block_tables.shape[1]):
            block_tables[i, j] = entries[row, j]
    query_starts[len(rows)] = position
    return num_copies


@compiled
def add(
    memory: Memory,
    tails: Tails,
    keys: NDArray[np.uint64],
    num_tokens: int,
    max_new_tokens: int,
    block_size: int,
) -> tuple[Outcome, int, int]:
    """Begin a sequence: find its cached prefix, and slots for what is not cached.

    `keys` uint64 [k, 2] are the keys of its full blocks, none without prefix caching. Past the
    cached prefix at most `max_new_tokens` of its `num_tokens` tokens get slots. Returns the
    outcome, the row, of which there must be a free one, and the number of cached tokens.
    """
    found = np.empty(len(keys), dtype=np.int32)
    num_hits, _ = allocation.find_prefix(memory.pool, keys, num_tokens, block_size, found)
    num_hits, num_hits_free = allocation.count_distinct(memory.pool, found, num_hits)
    num_cached = num_hits * block_size
    num_held = min(num_tokens, num_cached + max_new_tokens)
    needed = blocks_for(num_held, block_size) - num_hits
    available = memory.pool.counters[FREE] - num_hits_free
    if needed > available:
        return (OUT_OF_BLOCKS, needed, available), -1, 0
    row = take_row(memory.tables)
    allocation.share_prefix(memory, row, found, num_hits, block_size)
    no_copies = np.empty((0, 2), dtype=np.int32)
    allocation.grow(memory, row, num_held - num_cached, block_size, no_copies, 0)
    allocation.await_keys(memory, row, num_cached, num_held, keys, block_size)
    tails.known[row] = False
    return (OK, needed, available), row, num_cached


@compiled
def add_tokens(
    memory: Memory,
    tails: Tails,
    secret: NDArray[np.uint64],
    root: NDArray[np.uint64],
    token_ids: NDArray[np.int64],
    max_new_tokens: int,
    block_size: int,
    caching: bool,
) -> tuple[Outcome, int, int]:
    """`add` for a sequence whose keys follow from its token ids under the namespace's `root`."""
    for i in range(len(token_ids)):
        if token_ids[i] < 0 or token_ids[i] > MAX_TOKEN_ID:
            return (BAD_TOKEN, token_ids[i], i), -1, 0
    num_keys = len(token_ids) // block_size if caching else 0
    keys = np.empty((num_keys, 2), dtype=np.uint64)
    if caching:
        block_key.write_block_keys(secret, root, token_ids, block_size, keys)
    outcome, row, num_cached = add(memory, tails, keys, len(token_ids), max_new_tokens, block_size)
    if row >= 0:
        num_held = memory.tables.num_tokens[row]
        num_full = num_held // block_size
        tails.known[row] = True
        for i in range(2):
            tails.parent[row, i] = keys[num_full - 1, i] if caching and num_full > 0 else root[i]
        for i in range(num_full * block_size, num_held):
            tails.token_ids[row, i - num_full * block_size] = token_ids[i]
    return outcome, row, num_cached


@compiled_in_place
def fork_tail(tails: Tails, row: int, child: int) -> None:
    """Give `child` the tail of `row`."""
    for i in range(2):
        tails.parent[child, i] = tails.parent[row, i]
    for i in range(tails.token_ids.shape[1]):
        tails.token_ids[child, i] = tails.token_ids[row, i]
    tails.known[child] = tails.known[row]
