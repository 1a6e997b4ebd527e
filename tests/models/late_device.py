"""A device that computes each step as late as it may, and a model that is one number a token.

The number of a token follows from that of the token before it, which is read through the block
table, and from the token itself; what is said next follows from the number of the last one. So
whoever reads a slot that is not its own, or reads it before or after its time, says something else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from pagedkv.scheduling.continuous import Batch

_PRIME = 1_000_003
_FIRST = 17


def number_of(before: int, token: int) -> int:
    """The number of a token."""
    return (before * 31 + token * 7 + 5) % _PRIME


def token_said(number: int, sample: int) -> int:
    """What is said after a token of this number; samples of a prompt differ."""
    return (number + 11 * sample) % 5


def said_alone(prompt: Sequence[int], count: int, sample: int) -> list[int]:
    """What `sample` says to a prompt, computed without blocks."""
    number, said = _FIRST, []
    for token in prompt:
        number = number_of(number, token)
    for _ in range(count):
        said.append(token_said(number, sample))
        number = number_of(number, said[-1])
    return said


class LateDevice:
    """Steps are handed over in order, and computed when somebody asks for what they say."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.pages = np.full((num_blocks, block_size), -1, dtype=np.int64)
        self._block_size = block_size
        self._steps: list[tuple[Batch, list[int]]] = []
        self._said: NDArray[np.int64] = np.empty(0, dtype=np.int64)

    def launch(self, batch: Batch, sample_of: Callable[[int], int]) -> None:
        """Take a step; nothing is computed yet."""
        self._steps.append((batch, [sample_of(s) for s in batch.due.tolist()]))

    def read(self) -> list[int]:
        """Compute the oldest step that was handed over; what its due sequences say."""
        batch, samples = self._steps.pop(0)
        token_ids = batch.token_ids.copy()
        token_ids[batch.awaited[:, 0]] = self._said[batch.awaited[:, 1]]
        self.pages[batch.copies[:, 1]] = self.pages[batch.copies[:, 0]]
        slots = self.pages.reshape(-1)
        for i, table in enumerate(batch.block_tables.astype(np.int64)):
            for place in range(int(batch.query_starts[i]), int(batch.query_starts[i + 1])):
                position = int(batch.positions[place])
                before = _FIRST
                if position:
                    block, offset = divmod(position - 1, self._block_size)
                    before = int(slots[table[block] * self._block_size + offset])
                slots[batch.slots[place]] = number_of(before, int(token_ids[place]))
        numbers = slots[batch.slots[batch.due_rows]].tolist()
        self._said = np.array([token_said(n, s) for n, s in zip(numbers, samples)], dtype=np.int64)
        said: list[int] = self._said.tolist()
        return said
