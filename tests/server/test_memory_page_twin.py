"""The same sequences in contiguous regions, beside regions drawn slot by slot."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("fastapi", reason="needs the extra [server]")

from pagedkv.server.memory_page.changes import SEQUENCE_FIELDS
from pagedkv.server.memory_page.twin import Twin

SLOTS, SEATS = 40, 4


def rows(alive: dict[int, int]) -> np.ndarray:
    """Sequences by name -> most tokens, each in the column of its name."""
    made = np.zeros((len(alive), len(SEQUENCE_FIELDS)), dtype=np.int32)
    made[:, 0] = made[:, 1] = list(alive)
    made[:, 7] = list(alive.values())
    return made


class SlotBySlot:
    """Each slot has the name of who holds it; the smallest hole that is large enough is taken."""

    def __init__(self, longest: int | None) -> None:
        self.longest = longest
        self.slots = [0] * SLOTS
        self.waiting: list[int] = []
        self.known: set[int] = set()

    def follow(self, alive: dict[int, int]) -> None:
        self.slots = [name if name in alive else 0 for name in self.slots]
        self.waiting += [name for name in alive if name not in self.known]
        self.waiting = [name for name in self.waiting if name in alive]
        self.known = set(alive)
        while self.waiting and len(set(self.slots) - {0}) < SEATS:
            size = self.longest or max(alive[self.waiting[0]] - 1, 1)
            holes = []
            start = 0
            while start < SLOTS:
                stop = start
                while stop < SLOTS and self.slots[stop] == 0:
                    stop += 1
                if stop - start >= size:
                    holes.append((stop - start, start))
                start = max(stop, start + 1)
            if not holes:
                return
            start = min(holes)[1]
            self.slots[start : start + size] = [self.waiting.pop(0)] * size


@given(
    st.sampled_from([None, 12]),
    st.lists(st.tuples(st.integers(0, 30), st.lists(st.integers(1, 25), max_size=3)), max_size=15),
)
def test_regions_are_where_best_fit_puts_them_first_come_first_served(
    longest: int | None, story: list[tuple[int, list[int]]]
) -> None:
    twin = Twin(SLOTS, max_regions=SEATS, longest=longest)
    model = SlotBySlot(longest)
    alive: dict[int, int] = {}
    next_name = 1
    before = twin.rows
    for leaving, coming in story:
        ended = [list(alive)[leaving % len(alive)]] if alive else []
        for name in ended:
            del alive[name]
        came = range(next_name, next_name + len(coming))
        alive |= zip(came, coming)
        next_name += len(coming)
        is_other = twin.follow(ended, rows({name: alive[name] for name in came}))
        model.follow(alive)
        slots = [0] * SLOTS
        for start, size, name in twin.rows.tolist():
            assert slots[start : start + size] == [0] * size
            slots[start : start + size] = [name] * size
        assert slots == model.slots
        assert twin.waiting_columns == model.waiting
        assert is_other or np.array_equal(before, twin.rows)
        before = twin.rows


def test_who_finds_no_hole_blocks_those_behind_until_one_leaves() -> None:
    twin = Twin(SLOTS, max_regions=SEATS, longest=None)
    twin.follow([], rows({1: 31, 2: 21, 3: 3}))
    assert twin.is_blocked and twin.waiting_columns == [2, 3]
    twin.follow([1], rows({}))
    assert not twin.is_blocked and [row[2] for row in twin.rows.tolist()] == [2, 3]


def test_a_region_larger_than_the_memory_waits_for_ever() -> None:
    twin = Twin(SLOTS, max_regions=SEATS, longest=SLOTS + 1)
    assert not twin.follow([], rows({1: 2}))
    assert twin.is_blocked and len(twin.rows) == 0
