"""Contiguous regions over one memory: what paged memory replaces.

A region is a run of neighbouring token slots that one request holds until it leaves. Three
classic ways choose where it goes:

- **first fit**: the hole with the lowest address that is large enough;
- **best fit**: the smallest hole that is large enough, the lowest of equal ones;
- **buddy**: sizes are rounded up to a power of two, and a region of `2^k` slots starts at a
  multiple of `2^k`. The smallest free buddy that is large enough is halved until it fits, the
  lower half being kept.

Live regions are kept sorted by address, and that is all the state there is. A hole is what lies
between two neighbours, so holes coalesce by themselves. Free buddies follow from the holes too:
they are the largest aligned powers of two inside them, exactly what merging on every release
leaves. A memory that is no power of two is the sum of its descending powers of two, which the
same rule yields::

    15,728 slots = |8192|4096|2048|1024|256|64|32|16|   each piece aligned to its own size

Free lists, one for each order, would find a buddy in fewer steps, but they would be a second
account of the same memory that could disagree with the first. A scan over a few thousand
regions takes a few microseconds.

Source: D. E. Knuth, The Art of Computer Programming, volume 1, section 2.5.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pagedkv.compiling import compiled
from pagedkv.errors import InvalidInput

FIRST_FIT = 0
BEST_FIT = 1
BUDDY = 2

PLACEMENTS = {"first-fit": FIRST_FIT, "best-fit": BEST_FIT, "buddy": BUDDY}
"""Name of each placement, as the command line spells it -> the constant that `place` takes."""

NUM_SLOTS = 0
NUM_LIVE = 1
ASKED_SLOTS = 2
GRANTED_SLOTS = 3


class Regions(NamedTuple):
    """One memory and the regions that live in it, sorted by address.

    `start`, `size`, `granted` int64 [max_regions], in slots; the first `num_live(regions)`
    entries are the live regions. Region `i` was asked to hold `size[i]` slots and takes
    `[start[i], start[i] + granted[i])`; `granted` exceeds `size` under buddy only, by rounding.
    `totals` int64 [4]: slots in all, live regions, and the sums of `size` and of `granted`.
    """

    start: NDArray[np.int64]
    size: NDArray[np.int64]
    granted: NDArray[np.int64]
    totals: NDArray[np.int64]


def make_regions(num_slots: int, *, max_regions: int) -> Regions:
    """An empty memory of `num_slots` slots with room for `max_regions` regions at once.

    Raises `InvalidInput` unless both are at least 1.
    """
    if num_slots < 1:
        raise InvalidInput(f"num_slots is {num_slots}: a memory has at least 1 slot")
    if max_regions < 1:
        raise InvalidInput(f"max_regions is {max_regions}: it must be at least 1")
    return Regions(
        start=np.zeros(max_regions, np.int64),
        size=np.zeros(max_regions, np.int64),
        granted=np.zeros(max_regions, np.int64),
        totals=np.array([num_slots, 0, 0, 0], np.int64),
    )


@compiled
def place(regions: Regions, policy: int, size: int) -> int:
    """Take `size` neighbouring slots, and return the first one, or -1 where no hole fits.

    `policy` is FIRST_FIT, BEST_FIT or BUDDY, one and the same for the life of a memory. When
    nothing fits nothing changes. Raises ValueError for a size below 1, an unknown policy, and
    when `max_regions` regions live already. Cost: one pass over the live regions.
    """
    num_live = regions.totals[NUM_LIVE]
    index, start = _choose(regions, policy, size)
    if start < 0:
        return -1
    if num_live == len(regions.start):
        raise ValueError("the table of regions is full: raise max_regions")
    for i in range(num_live, index, -1):
        regions.start[i] = regions.start[i - 1]
        regions.size[i] = regions.size[i - 1]
        regions.granted[i] = regions.granted[i - 1]
    granted = granted_slots(policy, size)
    regions.start[index] = start
    regions.size[index] = size
    regions.granted[index] = granted
    regions.totals[NUM_LIVE] += 1
    regions.totals[ASKED_SLOTS] += size
    regions.totals[GRANTED_SLOTS] += granted
    return start


@compiled
def would_fit(regions: Regions, policy: int, size: int) -> bool:
    """Whether `place` would find a hole now. Changes nothing."""
    return _choose(regions, policy, size)[1] >= 0


@compiled
def remove(regions: Regions, start: int) -> int:
    """Give back the region that starts at slot `start`, and return the slots that this frees.

    Raises ValueError where no live region starts there, and changes nothing then.
    """
    num_live = regions.totals[NUM_LIVE]
    index = np.searchsorted(regions.start[:num_live], start)
    if index == num_live or regions.start[index] != start:
        raise ValueError("no live region starts there: it was never placed or is removed already")
    granted = int(regions.granted[index])
    regions.totals[NUM_LIVE] -= 1
    regions.totals[ASKED_SLOTS] -= regions.size[index]
    regions.totals[GRANTED_SLOTS] -= granted
    for i in range(index, num_live - 1):
        regions.start[i] = regions.start[i + 1]
        regions.size[i] = regions.size[i + 1]
        regions.granted[i] = regions.granted[i + 1]
    return granted


@compiled
def granted_slots(policy: int, size: int) -> int:
    """How many slots a region of `size` takes: `size`, or for BUDDY the next power of two."""
    granted = size
    if policy == BUDDY:
        granted = 1
        while granted < size:
            granted *= 2
    return granted


@compiled
def num_live(regions: Regions) -> int:
    """Number of live regions."""
    return int(regions.totals[NUM_LIVE])


@compiled
def live(
    regions: Regions,
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Start, size and granted size of every live region by address: int64 [num_live] views.

    The next `place` or `remove` changes what they show.
    """
    end = regions.totals[NUM_LIVE]
    return regions.start[:end], regions.size[:end], regions.granted[:end]


@compiled
def _choose(regions: Regions, policy: int, size: int) -> tuple[int, int]:
    """Index at which a new region goes into the arrays and its start, or (-1, -1)."""
    if size < 1:
        raise ValueError("a region has at least 1 slot")
    if policy != FIRST_FIT and policy != BEST_FIT and policy != BUDDY:
        raise ValueError("policy must be FIRST_FIT, BEST_FIT or BUDDY")
    num_slots = regions.totals[NUM_SLOTS]
    num_live = regions.totals[NUM_LIVE]
    chosen_index = -1
    chosen_start = -1
    if size > num_slots - regions.totals[GRANTED_SLOTS]:
        return chosen_index, chosen_start
    granted = granted_slots(policy, size)
    chosen_room = num_slots + 1
    hole = 0  # the hole before region i is [hole, hole_end)
    for i in range(num_live + 1):
        hole_end = regions.start[i] if i < num_live else num_slots
        if hole_end - hole >= granted:
            if policy == BUDDY:
                start, room = _smallest_buddy(hole, hole_end, granted)
            else:
                start, room = hole, hole_end - hole
            if room < chosen_room and start >= 0:
                chosen_index, chosen_start, chosen_room = i, start, room
                if policy == FIRST_FIT or room == granted:  # nothing later can be better
                    break
        if i < num_live:
            hole = regions.start[i] + regions.granted[i]
    return chosen_index, chosen_start


@compiled
def _smallest_buddy(hole: int, hole_end: int, granted: int) -> tuple[int, int]:
    """Start and size of the smallest free buddy of `granted` slots or more, or (-1, 0).

    Walks the largest aligned powers of two that make up `[hole, hole_end)`. Those that begin
    before the first multiple of `granted` are smaller than it.
    """
    chosen_start = -1
    chosen_room = 0
    start = (hole + granted - 1) & -granted
    while hole_end - start >= granted:
        room = granted
        while start & (2 * room - 1) == 0 and start + 2 * room <= hole_end:
            room *= 2
        if chosen_start < 0 or room < chosen_room:
            chosen_start, chosen_room = start, room
        start += room
    return chosen_start, chosen_room
