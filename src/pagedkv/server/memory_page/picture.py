"""All that has been told of the memory so far, for whoever begins to watch later."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pagedkv.compiling import compiled_in_place
from pagedkv.memory.block_table import NO_BLOCK
from pagedkv.server.memory_page.changes import (
    BLOCK_FIELDS,
    SEQUENCE_FIELDS,
    TABLE_FIELDS,
    Changes,
)


class Picture:
    """The sum of all changes."""

    def __init__(self, num_blocks: int, num_rows: int, width: int) -> None:
        self.blocks = np.zeros((num_blocks, len(BLOCK_FIELDS)), dtype=np.uint32)
        self.blocks[:, 0] = np.arange(num_blocks)
        self.tables = np.full((num_rows, width), NO_BLOCK, dtype=np.int32)
        self.sequences = np.zeros((0, len(SEQUENCE_FIELDS)), dtype=np.int32)

    def apply(self, changes: Changes) -> list[int]:
        """What was told is so from now on. Returns the names of the sequences that ended."""
        columns = changes.sequences[:, 0]
        missing = int(columns.max(initial=-1)) + 1 - len(self.sequences)
        if missing > 0:
            more = np.zeros((missing, len(SEQUENCE_FIELDS)), dtype=np.int32)
            more[:, 0] = np.arange(len(self.sequences), len(self.sequences) + missing)
            self.sequences = np.concatenate([self.sequences, more])
        ended = np.empty(len(columns), dtype=np.int32)
        num_ended = _apply(changes, self.blocks, self.tables, self.sequences, ended)
        names: list[int] = ended[:num_ended].tolist()
        return names

    def whole(self) -> Changes:
        """All of it, as changes to a memory whose blocks are free and which has no sequences."""
        rows, logical_blocks = np.nonzero(self.tables != NO_BLOCK)
        tables = np.empty((len(rows), len(TABLE_FIELDS)), dtype=np.int32)
        tables[:, 0], tables[:, 1] = rows, logical_blocks
        tables[:, 2] = self.tables[rows, logical_blocks]
        return Changes(
            blocks=self.blocks[self.blocks[:, 1:].any(1)], tables=tables, sequences=self.alive
        )

    @property
    def alive(self) -> NDArray[np.int32]:
        """The rows of sequences that have not ended, in the order of their names."""
        alive = self.sequences[self.sequences[:, 1] > 0]
        ordered: NDArray[np.int32] = alive[np.argsort(alive[:, 1], kind="stable")]
        return ordered


@compiled_in_place
def _apply(
    changes: Changes,
    blocks: NDArray[np.uint32],
    tables: NDArray[np.int32],
    sequences: NDArray[np.int32],
    ended: NDArray[np.int32],
) -> int:
    """Apply all changes; returns how many sequences ended, whose names are in `ended` then."""
    for i in range(len(changes.blocks)):
        block = changes.blocks[i, 0]
        for field in range(blocks.shape[1]):
            blocks[block, field] = changes.blocks[i, field]
    for i in range(len(changes.tables)):
        tables[changes.tables[i, 0], changes.tables[i, 1]] = changes.tables[i, 2]
    num_ended = 0
    for i in range(len(changes.sequences)):
        column = changes.sequences[i, 0]
        if sequences[column, 1] > 0 and sequences[column, 1] != changes.sequences[i, 1]:
            ended[num_ended] = sequences[column, 1]
            num_ended += 1
        for field in range(sequences.shape[1]):
            sequences[column, field] = changes.sequences[i, field]
    return num_ended
