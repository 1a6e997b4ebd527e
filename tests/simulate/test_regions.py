from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.regions import BuddyMemory, ByteMapMemory
from pagedkv.errors import InvalidInput
from pagedkv.simulate.regions import (
    ASKED_SLOTS,
    BEST_FIT,
    BUDDY,
    FIRST_FIT,
    GRANTED_SLOTS,
    PLACEMENTS,
    Regions,
    granted_slots,
    live,
    make_regions,
    num_live,
    place,
    remove,
    would_fit,
)

policies = st.sampled_from([FIRST_FIT, BEST_FIT, BUDDY])


def model_of(policy: int, num_slots: int) -> ByteMapMemory | BuddyMemory:
    if policy == BUDDY:
        return BuddyMemory(num_slots)
    return ByteMapMemory(num_slots, best=policy == BEST_FIT)


def check_laws(regions: Regions, policy: int, num_slots: int) -> None:
    start, size, granted = live(regions)
    end = start + granted
    assert num_live(regions) == len(start)
    assert regions.totals[ASKED_SLOTS] == size.sum()
    assert regions.totals[GRANTED_SLOTS] == granted.sum()
    assert (start[1:] >= end[:-1]).all(), "regions overlap or are out of order"
    if len(start):
        assert start[0] >= 0 and end[-1] <= num_slots
    if policy == BUDDY:
        assert ((granted & (granted - 1)) == 0).all()
        assert (start % granted == 0).all(), "a buddy is not aligned to its size"
        assert (granted < 2 * size).all()
    else:
        assert (granted == size).all()


@given(policy=policies, num_slots=st.integers(1, 300), data=st.data())
@settings(max_examples=150, deadline=None)
def test_every_placement_is_the_one_that_a_byte_for_each_slot_would_choose(policy, num_slots, data):
    regions = make_regions(num_slots, max_regions=64)
    model = model_of(policy, num_slots)
    actions = data.draw(
        st.lists(st.tuples(st.booleans(), st.integers(1, max(1, num_slots // 3 + 1))), max_size=60)
    )
    for wants_place, number in actions:
        if wants_place or not model.sizes:
            expected = model.place(number)
            assert would_fit(regions, policy, number) == (expected >= 0)
            assert place(regions, policy, number) == expected
        else:
            victim = sorted(model.sizes)[number % len(model.sizes)]
            assert remove(regions, victim) == model.remove(victim)
        assert dict(zip(live(regions)[0].tolist(), live(regions)[2].tolist(), strict=True)) == (
            model.sizes
        )
        check_laws(regions, policy, num_slots)


@given(policy=policies, sizes=st.lists(st.integers(1, 40), min_size=1, max_size=40), data=st.data())
@settings(max_examples=60, deadline=None)
def test_freed_memory_comes_back_whole_whatever_the_order(policy, sizes, data):
    num_slots = 2048
    regions = make_regions(num_slots, max_regions=64)
    starts = [place(regions, policy, size) for size in sizes]
    assert min(starts) >= 0
    for start in data.draw(st.permutations(starts)):
        remove(regions, start)
    assert num_live(regions) == 0
    assert regions.totals[ASKED_SLOTS] == regions.totals[GRANTED_SLOTS] == 0
    assert place(regions, policy, num_slots) == 0


def with_holes(num_slots: int, holes: list[tuple[int, int]]) -> Regions:
    """A memory that is full but for `holes`, (start, size) each."""
    regions = make_regions(num_slots, max_regions=num_slots)
    for _ in range(num_slots):
        place(regions, FIRST_FIT, 1)
    for start, size in holes:
        for slot in range(start, start + size):
            remove(regions, slot)
    return regions


def test_first_fit_takes_the_lowest_hole_and_best_fit_the_tightest():
    holes = [(2, 6), (12, 3), (20, 4), (28, 3)]
    assert place(with_holes(32, holes), FIRST_FIT, 3) == 2
    assert place(with_holes(32, holes), BEST_FIT, 3) == 12
    assert place(with_holes(32, holes), BEST_FIT, 2) == 12
    assert place(with_holes(32, holes), BEST_FIT, 4) == 20
    assert place(with_holes(32, holes), BEST_FIT, 5) == 2
    assert place(with_holes(32, holes), FIRST_FIT, 7) == -1


def test_enough_free_memory_in_scattered_holes_still_fits_nobody():
    regions = make_regions(8, max_regions=8)
    for _ in range(4):
        place(regions, FIRST_FIT, 2)
    remove(regions, 0)
    remove(regions, 4)
    assert not would_fit(regions, FIRST_FIT, 4)
    assert place(regions, FIRST_FIT, 4) == -1
    assert num_live(regions) == 2


def test_a_refused_placement_changes_nothing():
    regions = with_holes(16, [(3, 2), (9, 2)])
    before = [array.copy() for array in regions]
    for policy in (FIRST_FIT, BEST_FIT, BUDDY):
        assert place(regions, policy, 3) == -1
    for array, unchanged in zip(regions, before, strict=True):
        np.testing.assert_array_equal(array, unchanged)


def test_buddy_cuts_a_memory_of_any_size_into_descending_powers_of_two():
    regions = make_regions(15_728, max_regions=16)
    starts = [place(regions, BUDDY, 1 << k) for k in (13, 12, 11, 10, 8, 6, 5, 4)]
    assert starts == [0, 8192, 12288, 14336, 15360, 15616, 15680, 15712]
    assert place(regions, BUDDY, 1) == -1


def test_buddy_splits_the_smallest_free_buddy_that_is_large_enough_and_keeps_the_low_half():
    # Free buddies: 8 slots from 8, 4 from 20, 2 from 26, 4 from 28.
    holes = [(8, 8), (20, 4), (26, 6)]
    assert place(with_holes(32, holes), BUDDY, 8) == 8
    assert place(with_holes(32, holes), BUDDY, 3) == 20
    assert place(with_holes(32, holes), BUDDY, 2) == 26
    assert place(with_holes(32, [(8, 8), (20, 4)]), BUDDY, 2) == 20
    assert place(with_holes(32, holes), BUDDY, 9) == -1


def test_buddy_cannot_hand_out_more_than_its_largest_piece_although_more_is_free():
    regions = make_regions(15_728, max_regions=4)
    assert place(regions, BUDDY, 8193) == -1
    assert place(regions, FIRST_FIT, 8193) == 0


def test_buddy_counts_its_rounding_as_granted_and_not_as_asked():
    regions = make_regions(64, max_regions=4)
    place(regions, BUDDY, 5)
    assert (regions.totals[ASKED_SLOTS], regions.totals[GRANTED_SLOTS]) == (5, 8)
    assert granted_slots(BUDDY, 5) == 8
    assert granted_slots(BUDDY, 8) == 8
    assert granted_slots(BEST_FIT, 5) == 5
    assert remove(regions, 0) == 8


def test_a_region_removed_twice_or_never_placed_is_an_error_and_changes_nothing():
    regions = make_regions(16, max_regions=4)
    place(regions, FIRST_FIT, 4)
    start = place(regions, FIRST_FIT, 4)
    place(regions, FIRST_FIT, 4)
    remove(regions, start)
    for unknown in (start, 2, 9, 99):
        with pytest.raises(ValueError, match="no live region"):
            remove(regions, unknown)
    assert live(regions)[0].tolist() == [0, 8]


def test_a_region_without_slots_an_unknown_policy_and_a_full_table_are_errors():
    regions = make_regions(16, max_regions=1)
    with pytest.raises(ValueError, match="at least 1 slot"):
        place(regions, FIRST_FIT, 0)
    with pytest.raises(ValueError, match="policy"):
        place(regions, 3, 1)
    place(regions, FIRST_FIT, 1)
    with pytest.raises(ValueError, match="max_regions"):
        place(regions, FIRST_FIT, 1)
    with pytest.raises(InvalidInput, match="num_slots"):
        make_regions(0, max_regions=1)
    with pytest.raises(InvalidInput, match="max_regions"):
        make_regions(1, max_regions=0)


def test_placements_are_named_as_the_command_line_spells_them():
    assert PLACEMENTS == {"first-fit": FIRST_FIT, "best-fit": BEST_FIT, "buddy": BUDDY}
