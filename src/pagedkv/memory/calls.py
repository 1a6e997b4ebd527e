"""What Python calls: one compiled function for each verb of the manager.

State crosses as addresses. Numba takes 1.5 µs to unpack its sixteen arrays at each call, which is
more than most verbs take; to read where they are from one array takes 0.2.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numba
import numpy as np
from numpy.typing import NDArray

from pagedkv.compiling import compiled, numbers_at
from pagedkv.memory import allocation, block_table, extension
from pagedkv.memory.allocation import Memory
from pagedkv.memory.block_table import BlockTables
from pagedkv.memory.blocks import BlockPool
from pagedkv.memory.extension import OK, Arrays, Outcome, Tails

State: TypeAlias = NDArray[np.int64]
"""[16, 3]: address, length and width of each array of a `BlockPool`, a `BlockTables` and a
`Tails`. Whoever has it must keep these, too."""

BACKWARDS = 5
"""Status of `commit` for a count below what was computed or above what is held."""


def state_of(memory: Memory, tails: Tails) -> State:
    """Where the arrays are; nothing is copied."""
    arrays = (*memory.pool, *memory.tables, *tails)
    return np.array([(a.ctypes.data, len(a), a.size // max(len(a), 1)) for a in arrays])


@compiled
def _column(state: State, place: int, KIND: str) -> Any:
    return numba.carray(numbers_at(state[place, 0], KIND), state[place, 1])


@compiled
def _matrix(state: State, place: int, KIND: str) -> Any:
    return numba.carray(numbers_at(state[place, 0], KIND), (state[place, 1], state[place, 2]))


@compiled
def _memory_in(state: State) -> Memory:
    pool = BlockPool(
        ref_count=_column(state, 0, "int32"),
        next_free=_column(state, 1, "int32"),
        previous_free=_column(state, 2, "int32"),
        key=_matrix(state, 3, "uint64"),
        key_state=_column(state, 4, "int8"),
        key_index=_column(state, 5, "int32"),
        counters=_column(state, 6, "int64"),
    )
    tables = BlockTables(
        entries=_matrix(state, 7, "int32"),
        num_tokens=_column(state, 8, "int64"),
        num_computed=_column(state, 9, "int64"),
        generation=_column(state, 10, "int64"),
        free_rows=_column(state, 11, "int64"),
        num_free_rows=_column(state, 12, "int64"),
    )
    return Memory(pool, tables)


@compiled
def _tails_in(state: State) -> Tails:
    return Tails(
        parent=_matrix(state, 13, "uint64"),
        token_ids=_matrix(state, 14, "int64"),
        known=_column(state, 15, "bool_"),
    )


@compiled
def add_tokens(
    state: State,
    secret: NDArray[np.uint64],
    root: NDArray[np.uint64],
    token_ids: NDArray[np.int64],
    max_new_tokens: int,
    block_size: int,
    caching: bool,
) -> tuple[Outcome, int, int]:
    """`extension.add_tokens`; returns the outcome, the sequence and its cached tokens."""
    memory = _memory_in(state)
    outcome, row, num_cached = extension.add_tokens(
        memory, _tails_in(state), secret, root, token_ids, max_new_tokens, block_size, caching
    )
    return outcome, block_table.sequence_of(memory.tables, row) if row >= 0 else -1, num_cached


@compiled
def add_keyed(
    state: State, keys: NDArray[np.uint64], num_tokens: int, block_size: int
) -> tuple[Outcome, int, int]:
    """`extension.add`; returns the outcome, the sequence and its cached tokens."""
    memory = _memory_in(state)
    outcome, row, num_cached = extension.add(
        memory, _tails_in(state), keys, num_tokens, num_tokens, block_size
    )
    return outcome, block_table.sequence_of(memory.tables, row) if row >= 0 else -1, num_cached


@compiled
def extend_by_one(
    state: State,
    secret: NDArray[np.uint64],
    sequences: NDArray[np.int64],
    token_ids: NDArray[np.int64],
    block_size: int,
    caching: bool,
) -> tuple[Outcome, Arrays]:
    """One new token for each sequence."""
    counts = np.ones(len(sequences), dtype=np.int64)
    memory = _memory_in(state)
    return extension.extend(
        memory, _tails_in(state), secret, sequences, counts, token_ids, block_size, caching
    )


@compiled
def extend(
    state: State,
    secret: NDArray[np.uint64],
    sequences: NDArray[np.int64],
    counts: NDArray[np.int64],
    token_ids: NDArray[np.int64],
    block_size: int,
    caching: bool,
) -> tuple[Outcome, Arrays]:
    """`counts` new tokens for each sequence, their ids one sequence after the other."""
    memory = _memory_in(state)
    return extension.extend(
        memory, _tails_in(state), secret, sequences, counts, token_ids, block_size, caching
    )


@compiled
def find_rows(
    state: State, sequences: NDArray[np.int64], rows: NDArray[np.int64]
) -> tuple[int, int]:
    """Write each sequence's row; returns a status and the sequence at fault."""
    memory = _memory_in(state)
    return extension.find_rows(memory, sequences, rows)


@compiled
def commit_all(state: State, sequences: NDArray[np.int64], block_size: int) -> tuple[int, int]:
    """All tokens of each sequence are computed; returns a status and the sequence at fault."""
    memory = _memory_in(state)
    rows = np.empty(len(sequences), dtype=np.int64)
    status, fault = extension.find_rows(memory, sequences, rows)
    if status == OK:
        for i in range(len(rows)):
            allocation.commit(memory, rows[i], memory.tables.num_tokens[rows[i]], block_size)
    return status, fault


@compiled
def commit(
    state: State, sequences: NDArray[np.int64], num_computed: NDArray[np.int64], block_size: int
) -> tuple[int, int]:
    """So many tokens of each are computed; returns a status and the place of the one at fault."""
    memory = _memory_in(state)
    rows = np.empty(len(sequences), dtype=np.int64)
    status, fault = extension.find_rows(memory, sequences, rows)
    if status != OK:
        return status, fault
    for i in range(len(rows)):
        held, done = memory.tables.num_tokens[rows[i]], memory.tables.num_computed[rows[i]]
        if num_computed[i] < done or num_computed[i] > held:
            return BACKWARDS, i
    for i in range(len(rows)):
        allocation.commit(memory, rows[i], num_computed[i], block_size)
    return status, fault


@compiled
def fork(state: State, row: int) -> int:
    """A new sequence with all blocks of `row`."""
    memory = _memory_in(state)
    child = allocation.fork(memory, row)
    extension.fork_tail(_tails_in(state), row, child)
    return block_table.sequence_of(memory.tables, child)


@compiled
def free(state: State, row: int, block_size: int) -> None:
    """The sequence of `row` ends."""
    memory = _memory_in(state)
    allocation.release(memory, row, block_size)
