from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedkv.memory import block_table
from pagedkv.memory.block_table import FREE_ROW, NO_BLOCK, ROWS, BlockTables, make_tables


def test_rows_are_handed_out_from_0_and_the_last_returned_first() -> None:
    tables = make_tables(4, 2)
    assert [block_table.take_row(tables) for _ in range(3)] == [0, 1, 2]
    block_table.return_row(tables, 0)
    block_table.return_row(tables, 1)
    assert [block_table.take_row(tables) for _ in range(3)] == [1, 0, 3]
    assert tables.num_free_rows[0] == 0


def test_the_number_of_a_freed_sequence_never_names_a_later_one() -> None:
    tables = make_tables(1, 1)
    numbers = []
    for _ in range(5):
        row = block_table.take_row(tables)
        numbers.append(block_table.sequence_of(tables, row))
        assert [block_table.row_of(tables, number) for number in numbers[:-1]] == [-1] * (
            len(numbers) - 1
        )
        assert block_table.row_of(tables, numbers[-1]) == row
        block_table.return_row(tables, row)
        assert block_table.row_of(tables, numbers[-1]) == -1
    assert len(set(numbers)) == 5
    assert numbers[1] == ROWS


@pytest.mark.parametrize("number", [0, 1, 4, ROWS, ROWS - 1, 2**62])
def test_a_number_that_was_never_given_names_no_row(number: int) -> None:
    assert block_table.row_of(make_tables(4, 2), number) == -1


@pytest.mark.parametrize(("num_rows", "width"), [(4, 2), (9, 2), (4, 7), (9, 7)])
def test_larger_tables_hold_what_the_smaller_ones_held(num_rows: int, width: int) -> None:
    tables = make_tables(4, 2)
    rows = [block_table.take_row(tables) for _ in range(3)]
    tables.entries[rows[2]] = [5, 6]
    tables.num_tokens[rows[2]] = 20
    tables.num_computed[rows[2]] = 10
    block_table.return_row(tables, rows[1])
    numbers = [block_table.sequence_of(tables, row) for row in rows]

    larger = block_table.enlarged(tables, num_rows, width)
    assert larger.entries.shape == (num_rows, width)
    assert larger.entries[rows[2]].tolist() == [5, 6] + [NO_BLOCK] * (width - 2)
    assert (np.delete(larger.entries, rows[2], axis=0) == NO_BLOCK).all()
    assert (larger.num_tokens[rows[2]], larger.num_computed[rows[2]]) == (20, 10)
    assert [block_table.row_of(larger, number) for number in numbers] == [rows[0], -1, rows[2]]
    taken = [block_table.take_row(larger) for _ in range(num_rows - 2)]
    assert taken == [rows[1], 3, *range(4, num_rows)]
    assert block_table.sequence_of(larger, rows[1]) == rows[1] + ROWS


def test_a_fresh_row_begins_with_no_tokens() -> None:
    tables: BlockTables = make_tables(2, 2)
    assert tables.num_tokens.tolist() == [FREE_ROW, FREE_ROW]
    row = block_table.take_row(tables)
    assert (tables.num_tokens[row], tables.num_computed[row]) == (0, 0)


@given(num_tokens=st.integers(0, 10**6), block_size=st.integers(1, 100))
def test_blocks_for_is_the_quotient_rounded_up(num_tokens: int, block_size: int) -> None:
    num_blocks = block_table.blocks_for(num_tokens, block_size)
    assert (num_blocks - 1) * block_size < num_tokens <= num_blocks * block_size or num_tokens == 0
    assert num_tokens or num_blocks == 0
