"""What Python calls: one compiled function for each verb of the manager.

State crosses from Python as plain tuples of arrays, since Numba looks up the type of a named tuple
anew at each call: 4 µs for this state, against 1 µs. Inside it is `Memory` and `Tails` again.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pagedkv.compiling import compiled, compiled_in_place
from pagedkv.memory import allocation, block_table, extension
from pagedkv.memory.allocation import Memory
from pagedkv.memory.block_table import BlockTables
from pagedkv.memory.blocks import BlockPool
from pagedkv.memory.extension import OK, Arrays, Outcome, Tails

State: TypeAlias = tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]
"""The arrays of a `BlockPool`, a `BlockTables` and a `Tails`."""

BACKWARDS = 5
"""Status of `commit` for a count below what was computed or above what is held."""


def state_of(memory: Memory, tails: Tails) -> State:
    """The arrays as they cross; nothing is copied."""
    return tuple(memory.pool), tuple(memory.tables), tuple(tails)


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
    memory = Memory(BlockPool(*state[0]), BlockTables(*state[1]))
    outcome, row, num_cached = extension.add_tokens(
        memory, Tails(*state[2]), secret, root, token_ids, max_new_tokens, block_size, caching
    )
    return outcome, block_table.sequence_of(memory.tables, row) if row >= 0 else -1, num_cached


@compiled
def add_keyed(
    state: State, keys: NDArray[np.uint64], num_tokens: int, block_size: int
) -> tuple[Outcome, int, int]:
    """`extension.add`; returns the outcome, the sequence and its cached tokens."""
    memory = Memory(BlockPool(*state[0]), BlockTables(*state[1]))
    outcome, row, num_cached = extension.add(
        memory, Tails(*state[2]), keys, num_tokens, num_tokens, block_size
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
    memory = Memory(BlockPool(*state[0]), BlockTables(*state[1]))
    return extension.extend(
        memory, Tails(*state[2]), secret, sequences, counts, token_ids, block_size, caching
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
    memory = Memory(BlockPool(*state[0]), BlockTables(*state[1]))
    return extension.extend(
        memory, Tails(*state[2]), secret, sequences, counts, token_ids, block_size, caching
    )


@compiled_in_place
def find_rows(
    state: State, sequences: NDArray[np.int64], rows: NDArray[np.int64]
) -> tuple[int, int]:
    """Write each sequence's row; returns a status and the sequence at fault."""
    memory = Memory(BlockPool(*state[0]), BlockTables(*state[1]))
    return extension.find_rows(memory, sequences, rows)


@compiled
def commit_all(state: State, sequences: NDArray[np.int64], block_size: int) -> tuple[int, int]:
    """All tokens of each sequence are computed; returns a status and the sequence at fault."""
    memory = Memory(BlockPool(*state[0]), BlockTables(*state[1]))
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
    memory = Memory(BlockPool(*state[0]), BlockTables(*state[1]))
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


@compiled_in_place
def fork(state: State, row: int) -> int:
    """A new sequence with all blocks of `row`."""
    memory = Memory(BlockPool(*state[0]), BlockTables(*state[1]))
    child = allocation.fork(memory, row)
    extension.fork_tail(Tails(*state[2]), row, child)
    return block_table.sequence_of(memory.tables, child)


@compiled_in_place
def free(state: State, row: int, block_size: int) -> None:
    """The sequence of `row` ends."""
    memory = Memory(BlockPool(*state[0]), BlockTables(*state[1]))
    allocation.release(memory, row, block_size)
