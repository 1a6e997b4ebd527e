"""Storage with one number a slot in place of keys and values, to read back what was written.

The number of a token stands for all that its keys and values depend on: the namespace, the tokens
before it and itself. So two sequences may read the same slot only where they would write the same.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

import numpy as np
from numpy.typing import NDArray

GARBAGE = -1


class TokenStorage:
    """`num_blocks` pages of `block_size` slots, all garbage at first."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._pages = np.full((num_blocks, block_size), GARBAGE, dtype=np.int64)
        self._numbers: dict[Hashable, int] = {}

    def content(
        self, namespace: Hashable, tokens: Iterable[int], start: int, stop: int
    ) -> NDArray[np.int64]:
        """What tokens `start` to `stop` of a sequence must read as."""
        prefix = tuple(tokens)
        names = ((namespace, prefix[: i + 1]) for i in range(start, stop))
        return np.array([self._numbers.setdefault(name, len(self._numbers)) for name in names])

    def write(self, slots: NDArray[np.int64], content: NDArray[np.int64]) -> None:
        self._pages.reshape(-1)[slots] = content

    def copy_pages(self, copies: NDArray[np.int32]) -> None:
        """All pages are read before one is written, as a kernel may do it."""
        self._pages[copies[:, 1]] = self._pages[copies[:, 0]]

    def read(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        return self._pages.reshape(-1)[slots]

    def spoil(self, blocks: Iterable[int]) -> None:
        """Nobody may read these blocks, so anything may stand there."""
        self._pages[list(blocks)] = GARBAGE
