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


def rows(changed: dict[int, tuple[int, int]]) -> np.ndarray:
    """Changed columns, each with who it is of now: a name and most tokens."""
    made = np.zeros((len(changed), len(SEQUENCE_FIELDS)), dtype=np.int32)
    ordered = sorted(changed.items(), key=lambda item: item[1][0])
    for row, (column, (name, most)) in zip(made, ordered):
        row[[0, 1, 7]] = column, name, most
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
    column_of: dict[int, int] = {}
    next_name = 1
    before = twin.rows
    for leaving, coming in story:
        changed = {}
        if alive:
            ended = list(alive)[leaving % len(alive)]
            del alive[ended]
            changed[column_of.pop(ended)] = 0, 0
        for most in coming:  # into the lowest column that is free, maybe by now
            column = min(set(range(len(alive) + 1)) - set(column_of.values()))
            column_of[next_name], alive[next_name] = column, most
            changed[column] = next_name, most
            next_name += 1
        for name, most in alive.items():  # those that have another token are told as well
            changed.setdefault(column_of[name], (name, most))
        is_other = twin.follow(rows(changed))
        model.follow(alive)
        slots = [0] * SLOTS
        name_in = {column: name for name, column in column_of.items()}
        for start, size, column in twin.rows.tolist():
            assert slots[start : start + size] == [0] * size
            slots[start : start + size] = [name_in[column]] * size
        assert slots == model.slots
        assert [name_in[column] for column in twin.waiting_columns] == model.waiting
        assert is_other or np.array_equal(before, twin.rows)
        before = twin.rows


def test_who_finds_no_hole_blocks_those_behind_until_one_leaves() -> None:
    twin = Twin(SLOTS, max_regions=SEATS, longest=None)
    twin.follow(rows({1: (1, 31), 2: (2, 21), 3: (3, 3)}))
    assert twin.is_blocked and twin.waiting_columns == [2, 3]
    twin.follow(rows({1: (0, 0)}))
    assert not twin.is_blocked and [row[2] for row in twin.rows.tolist()] == [2, 3]


def test_a_region_larger_than_the_memory_waits_for_ever() -> None:
    twin = Twin(SLOTS, max_regions=SEATS, longest=SLOTS + 1)
    assert not twin.follow(rows({1: (1, 2)}))
    assert twin.is_blocked and len(twin.rows) == 0
