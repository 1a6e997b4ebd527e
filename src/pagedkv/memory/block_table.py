"""Block tables: one row a sequence, entry `i` the physical block of logical block `i`.

Rows are recycled. A sequence's number is its row plus `ROWS` times the row's generation, so that
the number of a freed sequence never names a later one.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pagedkv.compiling import compiled_in_place

ROWS = 1 << 24
"""More rows than there can be; a sequence's number modulo this is its row."""

NO_BLOCK = -1
"""Fills a row beyond the sequence's last block."""

FREE_ROW = -1
"""`num_tokens` of a row that belongs to no sequence."""


class BlockTables(NamedTuple):
    """Columns over rows."""

    entries: NDArray[np.int32]  # [num_rows, width]
    num_tokens: NDArray[np.int64]  # [num_rows], tokens that have a slot
    num_computed: NDArray[np.int64]  # [num_rows], of those, whose K and V are in the blocks
    generation: NDArray[np.int64]  # [num_rows]
    free_rows: NDArray[np.int64]  # [num_rows], a stack; the top is handed out next
    num_free_rows: NDArray[np.int64]  # [1]


def make_tables(num_rows: int, width: int) -> BlockTables:
    """Empty tables for `num_rows` sequences of up to `width` blocks."""
    return BlockTables(
        entries=np.full((num_rows, width), NO_BLOCK, dtype=np.int32),
        num_tokens=np.full(num_rows, FREE_ROW, dtype=np.int64),
        num_computed=np.zeros(num_rows, dtype=np.int64),
        generation=np.zeros(num_rows, dtype=np.int64),
        free_rows=np.arange(num_rows - 1, -1, -1, dtype=np.int64),
        num_free_rows=np.array([num_rows], dtype=np.int64),
    )


def enlarged(tables: BlockTables, num_rows: int, width: int) -> BlockTables:
    """The same tables with room for more rows or more blocks a row."""
    old_rows, old_width = tables.entries.shape
    larger = make_tables(num_rows, width)
    larger.entries[:old_rows, :old_width] = tables.entries
    larger.num_tokens[:old_rows] = tables.num_tokens
    larger.num_computed[:old_rows] = tables.num_computed
    larger.generation[:old_rows] = tables.generation
    num_free = int(tables.num_free_rows[0])
    new_rows = np.arange(num_rows - 1, old_rows - 1, -1, dtype=np.int64)
    larger.free_rows[: len(new_rows)] = new_rows
    larger.free_rows[len(new_rows) : len(new_rows) + num_free] = tables.free_rows[:num_free]
    larger.num_free_rows[0] = len(new_rows) + num_free
    return larger


@compiled_in_place
def take_row(tables: BlockTables) -> int:
    """Hand out a free row for a sequence of no tokens; the caller has made sure there is one."""
    tables.num_free_rows[0] -= 1
    row = int(tables.free_rows[tables.num_free_rows[0]])
    tables.num_tokens[row] = 0
    tables.num_computed[row] = 0
    return row


@compiled_in_place
def return_row(tables: BlockTables, row: int) -> None:
    """Take back a row whose entries are all `NO_BLOCK`; its sequence's number is spent."""
    tables.num_tokens[row] = FREE_ROW
    tables.num_computed[row] = 0
    tables.generation[row] += 1
    tables.free_rows[tables.num_free_rows[0]] = row
    tables.num_free_rows[0] += 1


@compiled_in_place
def sequence_of(tables: BlockTables, row: int) -> int:
    """The number of the sequence that has `row`."""
    return row + ROWS * int(tables.generation[row])


@compiled_in_place
def row_of(tables: BlockTables, sequence: int) -> int:
    """The row of `sequence`, or -1 where no such sequence is alive."""
    row = sequence % ROWS
    if (
        row >= len(tables.num_tokens)
        or tables.num_tokens[row] == FREE_ROW
        or sequence_of(tables, row) != sequence
    ):
        return -1
    return row


@compiled_in_place
def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold `num_tokens` tokens: the quotient, rounded up."""
    return (num_tokens + block_size - 1) // block_size
