"""The same sequences in contiguous regions: what this server's memory would look like unpaged.

The regions are the simulator's own (`pagedkv.simulate.regions`). Each sequence is as far as it is
in the blocks; here it holds one region from its beginning to its end, reserved when there is a
hole for it, first come first served. What its answer will come to nobody knows beforehand, so a
region is as long as the model's longest sequence, or, at best, as what the request itself allows.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pagedkv.compiling import compiled
from pagedkv.simulate import regions

REGION_FIELDS = ("start", "size", "column")
"""Of a row of `Twin.rows`: the first slot, the slots reserved, and whose region it is."""


class Twin:
    """One contiguous memory of `num_slots` slots beside the blocks.

    A region has `longest` slots, or for None as many as its sequence may come to need.
    """

    def __init__(self, num_slots: int, *, max_regions: int, longest: int | None) -> None:
        self._longest = longest
        self._regions = regions.make_regions(num_slots, max_regions=max_regions)
        self._seats = max_regions
        self._placed: dict[int, int] = {}  # by name: where its region starts
        self._column_at: dict[int, int] = {}  # by where the region starts
        self._waiting: deque[int] = deque()
        self._alive: dict[int, tuple[int, int]] = {}  # by name: column, most tokens
        self.is_blocked = False
        """Whether the first that waits fits into no hole."""

    def follow(self, ended: Sequence[int], came: NDArray[np.int32]) -> bool:
        """Let go who `ended`, by name, and place who `came`, int32 [n, 9] as `Changes.sequences`.

        Returns whether any region differs now.
        """
        if not self._placed.keys() >= set(ended):
            gone = set(ended)
            self._waiting = deque(name for name in self._waiting if name not in gone)
        left = [self._placed.pop(name) for name in ended if name in self._placed]
        if left:
            _remove_all(self._regions, np.array(left, dtype=np.int64))
        for start in left:
            del self._column_at[start]
        for name in ended:
            del self._alive[name]
        for column, name, *_, most, _ in came.tolist():
            self._alive[name] = column, most
            self._waiting.append(name)
        return self._place_waiting() or bool(left)

    @property
    def rows(self) -> NDArray[np.int32]:
        """All regions by address, int32 [n, 3], see `REGION_FIELDS`."""
        num_placed = len(self._placed)
        rows = np.empty((num_placed, len(REGION_FIELDS)), dtype=np.int32)
        rows[:, 0] = self._regions.start[:num_placed]
        rows[:, 1] = self._regions.size[:num_placed]
        rows[:, 2] = [self._column_at[start] for start in self._regions.start[:num_placed].tolist()]
        return rows

    @property
    def waiting_columns(self) -> list[int]:
        """Columns of the sequences that have no region, the first in line first."""
        return [self._alive[name][0] for name in self._waiting]

    def _place_waiting(self) -> bool:
        """Place those who wait, in order, until one does not fit."""
        first = list(itertools.islice(self._waiting, self._seats - len(self._placed)))
        starts: list[int] = []
        if first:
            # Nothing is computed after the last token, so it needs no slot.
            sizes = [self._longest or max(self._alive[name][1] - 1, 1) for name in first]
            found = np.empty(len(first), dtype=np.int64)
            num_placed = _place_all(self._regions, np.array(sizes, dtype=np.int64), found)
            starts = found[:num_placed].tolist()
        for name, start in zip(first, starts):
            self._waiting.popleft()
            self._placed[name] = start
            self._column_at[start] = self._alive[name][0]
        self.is_blocked = len(starts) < len(first)
        return bool(starts)


@compiled
def _remove_all(memory: regions.Regions, starts: NDArray[np.int64]) -> None:
    """Give back the regions that begin at `starts`."""
    for start in starts:
        regions.remove(memory, start)


@compiled
def _place_all(memory: regions.Regions, sizes: NDArray[np.int64], starts: NDArray[np.int64]) -> int:
    """Place regions of `sizes` until one does not fit; returns how many begin at `starts` now."""
    for i in range(len(sizes)):
        starts[i] = regions.place(memory, regions.BEST_FIT, sizes[i])
        if starts[i] < 0:
            return i
    return len(sizes)
