"""The same sequences in contiguous regions: what this server's memory would look like unpaged.

The regions are the simulator's own (`pagedkv.simulate.regions`). Each sequence is as far as it is
in the blocks; here it holds one region from its beginning to its end, reserved when there is a
hole for it, first come first served. What its answer will come to nobody knows beforehand, so a
region is as long as the model's longest sequence, or, at best, as what the request itself allows.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pagedkv.compiling import compiled
from pagedkv.simulate import regions

REGION_FIELDS = ("start", "size", "column")
"""Of a row of `Twin.rows`: the first slot, the slots reserved, and whose region it is."""

NO_REGION = -1

NUM_WAITING = 0
IS_BLOCKED = 1


class _Sequences(NamedTuple):
    """Who is alive, by column as in `changes.SEQUENCE_FIELDS`, and the line of those who wait."""

    name: NDArray[np.int64]  # [columns]; 0 where the column is nobody's
    most: NDArray[np.int64]  # [columns], tokens that it may come to
    start: NDArray[np.int64]  # [columns], of its region, or NO_REGION
    waiting: NDArray[np.int64]  # [columns], columns, the first in line first
    counters: NDArray[np.int64]  # [2], see above


class Twin:
    """One contiguous memory of `num_slots` slots beside the blocks.

    A region has `longest` slots, or for None as many as its sequence may come to need.
    """

    def __init__(self, num_slots: int, *, max_regions: int, longest: int | None) -> None:
        self._longest = longest or 0
        self._regions = regions.make_regions(num_slots, max_regions=max_regions)
        self._sequences = _with_room(None, 0)
        self._rows = np.empty((max_regions, len(REGION_FIELDS)), dtype=np.int32)

    def follow(self, changed: NDArray[np.int32]) -> bool:
        """Let go who ended and place who came; `changed` int32 [n, 9] as `Changes.sequences`.

        Returns whether any region differs now.
        """
        num_columns = int(changed[:, 0].max(initial=-1)) + 1
        if num_columns > len(self._sequences.name):
            self._sequences = _with_room(self._sequences, num_columns)
        return _follow(self._regions, self._sequences, changed, self._longest, self._rows)

    @property
    def rows(self) -> NDArray[np.int32]:
        """All regions by address, int32 [n, 3], see `REGION_FIELDS`."""
        return self._rows[: self._regions.totals[regions.NUM_LIVE]].copy()

    @property
    def waiting_columns(self) -> list[int]:
        """Columns of the sequences that have no region, the first in line first."""
        num_waiting = self._sequences.counters[NUM_WAITING]
        columns: list[int] = self._sequences.waiting[:num_waiting].tolist()
        return columns

    @property
    def is_blocked(self) -> bool:
        """Whether the first that waits fits into no hole."""
        return bool(self._sequences.counters[IS_BLOCKED])


def _with_room(sequences: _Sequences | None, num_columns: int) -> _Sequences:
    """The same sequences, with room for more columns."""
    made = _Sequences(
        name=np.zeros(num_columns, dtype=np.int64),
        most=np.zeros(num_columns, dtype=np.int64),
        start=np.full(num_columns, NO_REGION, dtype=np.int64),
        waiting=np.zeros(num_columns, dtype=np.int64),
        counters=np.zeros(2, dtype=np.int64),
    )
    if sequences is not None:
        for new, old in zip(made, sequences):
            new[: len(old)] = old
    return made


@compiled
def _follow(
    memory: regions.Regions,
    sequences: _Sequences,
    changed: NDArray[np.int32],
    longest: int,
    rows: NDArray[np.int32],
) -> bool:
    """Let go who ended and place who came, and write `rows`; whether any region differs now."""
    is_other = False
    for i in range(len(changed)):
        column = changed[i, 0]
        if sequences.name[column] != changed[i, 1] and sequences.name[column] > 0:
            sequences.name[column] = 0
            if sequences.start[column] != NO_REGION:
                regions.remove(memory, sequences.start[column])
                sequences.start[column] = NO_REGION
                is_other = True
    num_waiting = 0
    for i in range(sequences.counters[NUM_WAITING]):
        column = sequences.waiting[i]
        if sequences.name[column] > 0:
            sequences.waiting[num_waiting] = column
            num_waiting += 1
    for i in range(len(changed)):
        column = changed[i, 0]
        if changed[i, 1] > 0 and sequences.name[column] == 0:
            sequences.name[column] = changed[i, 1]
            sequences.most[column] = changed[i, 7]
            sequences.waiting[num_waiting] = column
            num_waiting += 1
    sequences.counters[NUM_WAITING] = num_waiting
    is_other |= _place_waiting(memory, sequences, longest)
    if is_other:
        _write_rows(memory, sequences, rows)
    return is_other


@compiled
def _place_waiting(memory: regions.Regions, sequences: _Sequences, longest: int) -> bool:
    """Place those who wait, in order, until one does not fit; whether any did."""
    num_waiting = sequences.counters[NUM_WAITING]
    num_placed = 0
    is_blocked = False
    while num_placed < num_waiting and regions.num_live(memory) < len(memory.start):
        column = sequences.waiting[num_placed]
        # Nothing is computed after the last token, so it needs no slot.
        size = longest if longest > 0 else max(sequences.most[column] - 1, 1)
        start = regions.place(memory, regions.BEST_FIT, size)
        if start < 0:
            is_blocked = True
            break
        sequences.start[column] = start
        num_placed += 1
    for i in range(num_placed, num_waiting):
        sequences.waiting[i - num_placed] = sequences.waiting[i]
    sequences.counters[NUM_WAITING] = num_waiting - num_placed
    sequences.counters[IS_BLOCKED] = is_blocked
    return num_placed > 0


@compiled
def _write_rows(memory: regions.Regions, sequences: _Sequences, rows: NDArray[np.int32]) -> None:
    """Write all regions by address."""
    num_live = regions.num_live(memory)
    for i in range(num_live):
        rows[i, 0] = memory.start[i]
        rows[i, 1] = memory.size[i]
    for column in range(len(sequences.start)):
        if sequences.start[column] != NO_REGION:
            place = np.searchsorted(memory.start[:num_live], sequences.start[column])
            rows[place, 2] = column
