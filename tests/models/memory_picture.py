"""What a page that watches the memory knows: the sum of all that it was told."""

from __future__ import annotations

import numpy as np

from pagedkv.memory.block_table import NO_BLOCK
from pagedkv.server.memory_page.changes import BLOCK_FIELDS, SEQUENCE_FIELDS, Changes


class Picture:
    """A memory of which nothing is known, until `apply`."""

    def __init__(self, num_blocks: int, num_rows: int, width: int) -> None:
        self.blocks = np.zeros((num_blocks, len(BLOCK_FIELDS)), dtype=np.uint32)
        self.blocks[:, 0] = np.arange(num_blocks)
        self.tables = np.full((num_rows, width), NO_BLOCK, dtype=np.int32)
        self.by_column: dict[int, list[int]] = {}

    def apply(self, changes: Changes) -> None:
        """What was told is so from now on."""
        for row in changes.blocks:
            self.blocks[row[0]] = row
        for row, logical_block, block in changes.tables.tolist():
            self.tables[row, logical_block] = block
        for sequence in changes.sequences.tolist():
            self.by_column[sequence[0]] = sequence

    @property
    def alive(self) -> np.ndarray:
        """The rows of sequences that have not ended, in the order of their names."""
        alive = [row for row in self.by_column.values() if row[1] > 0]
        alive.sort(key=lambda row: row[1])
        return np.array(alive, dtype=np.int32).reshape(-1, len(SEQUENCE_FIELDS))
