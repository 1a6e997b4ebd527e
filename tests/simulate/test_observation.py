"""Observed memory: time-weighted means, intervals that merge, snapshots that thin out."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedkv.simulate import observation as observed
from pagedkv.simulate.observation import Observation
from pagedkv.simulate.results import KINDS

Period = tuple[float, list[int], int, int]  # seconds, slots of each kind, running, waiting


@st.composite
def periods(draw: st.DrawFn) -> tuple[int, list[Period]]:
    num_slots = draw(st.integers(1, 1000))
    made = []
    for _ in range(draw(st.integers(1, 30))):
        cuts = sorted(draw(st.lists(st.integers(0, num_slots), min_size=5, max_size=5)))
        slots = np.diff([0, *cuts, num_slots]).tolist()
        seconds = draw(st.sampled_from([1e-6, 0.013, 0.02, 0.5, 1.0, 7.3, 100.0, 3000.0]))
        made.append((seconds, slots, draw(st.integers(0, 3)), draw(st.integers(0, 3))))
    return num_slots, made


def observation_of(made: list[Period], *, expected_s: float) -> tuple[Observation, float]:
    seen = observed.make_observation(expected_s=expected_s, num_blocks=64)
    now_s = 0.0
    for seconds, slots, running, waiting in made:
        observed.observe(
            seen, now_s, now_s + seconds, np.array(slots, dtype=np.float64), running, waiting
        )
        now_s += seconds
    return seen, now_s


@given(periods(), st.sampled_from([0.0, 0.1, 10.0, 5000.0]))
def test_the_timeline_is_the_time_weighted_mean_of_what_was_observed(
    case: tuple[int, list[Period]], expected_s: float
) -> None:
    num_slots, made = case
    seen, end_s = observation_of(made, expected_s=expected_s)
    line = observed.timeline(seen)
    assert line.share.sum(axis=1) == pytest.approx(1.0)
    assert 1 <= len(line.start_s) <= 512
    assert line.start_s[0] == 0.0 and line.end_s[-1] == pytest.approx(end_s)
    assert line.end_s[:-1] == pytest.approx(line.start_s[1:], rel=1e-6), "no time is lost"

    starts = np.cumsum([0.0, *(seconds for seconds, *_ in made)])
    latest_start = np.maximum(line.start_s[:, None], starts[None, :-1])
    overlap = np.maximum(np.minimum(line.end_s[:, None], starts[None, 1:]) - latest_start, 0.0)
    weights = overlap / overlap.sum(axis=1, keepdims=True)
    share = np.array([m[1] for m in made]) / num_slots
    assert np.allclose(line.share, weights @ share, rtol=1e-4, atol=1e-5)
    assert np.allclose(line.running, weights @ [m[2] for m in made], rtol=1e-4, atol=1e-4)
    assert np.allclose(line.waiting, weights @ [m[3] for m in made], rtol=1e-4, atol=1e-4)


@given(periods())
def test_shares_are_of_the_time_in_which_requests_wait_or_run(
    case: tuple[int, list[Period]],
) -> None:
    num_slots, made = case
    seen, _ = observation_of(made, expected_s=1.0)
    busy = [m for m in made if m[2] + m[3] > 0]
    busy_s = sum(m[0] for m in busy)
    share = observed.busy_share(seen)
    assert list(share) == list(KINDS)
    assert sum(share.values()) == pytest.approx(1.0)
    if not busy:
        assert share["free"] == 1.0
        return
    for kind, name in enumerate(KINDS):
        mean = sum(seconds * slots[kind] for seconds, slots, *_ in busy) / busy_s / num_slots
        assert share[name] == pytest.approx(mean)
    assert seen.times[observed.BUSY_S] == pytest.approx(busy_s)
    for column, place in ((observed.RUNNING_COLUMN, 2), (observed.WAITING_COLUMN, 3)):
        assert seen.busy[column] == pytest.approx(sum(m[0] * m[place] for m in busy))


def test_a_run_longer_than_expected_doubles_its_intervals_and_keeps_every_sum() -> None:
    made: list[Period] = [(1.0, [i % 7, 7 - i % 7, 0, 0, 0, 0], i % 3, 0) for i in range(3000)]
    seen, end_s = observation_of(made, expected_s=1.0)
    line = observed.timeline(seen)
    assert seen.times[observed.INTERVAL_S] == 8.0  # 2 / 512 s, doubled until 3,000 s fit
    assert end_s == 3000 and len(line.start_s) == 375
    assert seen.interval[:, observed.TIME_COLUMN].sum() == pytest.approx(3000)
    assert seen.interval[:, 0].sum() == sum(m[1][0] for m in made)
    assert line.share[0, 0] == pytest.approx(sum(m[1][0] for m in made[:8]) / 8 / 7)


def test_a_period_that_ends_with_an_interval_stays_in_it() -> None:
    seen = observed.make_observation(expected_s=256.0, num_blocks=4)
    assert seen.times[observed.INTERVAL_S] == 1.0
    slots = np.array([4.0, 0, 0, 0, 0, 0])
    observed.observe(seen, 0.0, 1.0, slots, 1, 0)
    observed.observe(seen, 1.0, 3.0, slots / 2, 1, 0)
    assert seen.interval[:4, observed.TIME_COLUMN].tolist() == [1.0, 1.0, 1.0, 0.0]
    assert seen.interval[:4, 0].tolist() == [4.0, 2.0, 2.0, 0.0]


@given(st.integers(1, 400), st.data())
def test_slots_are_counted_in_the_row_that_shows_them(num_slots: int, data: st.DataObject) -> None:
    num_blocks = data.draw(st.integers(1, num_slots))
    seen = observed.make_observation(expected_s=1.0, num_blocks=num_blocks)
    num_rows = len(seen.map_slots)
    assert num_rows == min(num_blocks, 160)
    expected = np.zeros((num_rows, 7))
    assert observed.is_snapshot_due(seen, 0.0)
    for _ in range(data.draw(st.integers(0, 5))):
        start = data.draw(st.integers(0, num_slots))
        stop = data.draw(st.integers(start, num_slots))
        kind = data.draw(st.integers(0, 6))
        if start == stop == num_slots:
            continue
        observed.count_slots(seen, kind, start, stop, num_slots)
        for slot in range(start, stop):
            expected[slot * num_rows // num_slots, kind] += 1
    assert (seen.map_slots == expected).all()


def test_a_row_of_one_kind_shows_it() -> None:
    seen = observed.make_observation(expected_s=1.0, num_blocks=2)
    assert observed.is_snapshot_due(seen, 0.0)
    observed.count_slots(seen, observed.NEVER_USED, 0, 10, 20)
    observed.count_slots(seen, observed.TOKEN_STATES, 10, 20, 20)
    observed.count_slots(seen, 6, 10, 20, 20)
    observed.take_snapshot(seen, 0.0)
    shown = observed.memory_map(seen, num_slots=20)
    assert shown.kind[:, 0].tolist() == [observed.NEVER_USED, observed.TOKEN_STATES]
    assert shown.shared[:, 0].tolist() == [0, 1]
    assert shown.slots_per_row == 10.0

    assert observed.is_snapshot_due(seen, 1.0)
    observed.count_slots(seen, observed.FREE_KIND, 0, 20, 20)
    observed.take_snapshot(seen, 1.0)
    shown = observed.memory_map(seen, num_slots=20)
    assert shown.kind[:, 1].tolist() == [observed.FREE_KIND, observed.FREE_KIND]
    assert shown.shared[:, 1].tolist() == [0, 0]


def test_kinds_mixed_in_every_row_are_shown_in_proportion_and_do_not_flicker() -> None:
    seen = observed.make_observation(expected_s=1.0, num_blocks=160)
    percent = {observed.TOKEN_STATES: 30, observed.RESERVED: 5, observed.CACHED_KIND: 65}
    for now_s in (0.0, 1.0):
        assert observed.is_snapshot_due(seen, now_s)
        for row in range(160):
            at = 100 * row
            for kind, slots in percent.items():
                observed.count_slots(seen, kind, at, at + slots, 16_000)
                at += slots
            observed.count_slots(seen, 6, 100 * row, 100 * row + 15, 16_000)
        observed.take_snapshot(seen, now_s)
    shown = observed.memory_map(seen, num_slots=16_000)
    assert (shown.kind[:, 0] == shown.kind[:, 1]).all()
    for kind in range(6):
        share = 100 * np.mean(shown.kind[:, 0] == kind)
        assert share == pytest.approx(percent.get(kind, 0), abs=1.5)
    of_used = shown.shared[:, 0][shown.kind[:, 0] == observed.TOKEN_STATES]
    assert of_used.sum() > 0


@pytest.mark.parametrize("run_s", [10.0, 100.0, 2_000.0, 50_000.0])
def test_snapshots_stay_evenly_spread_however_long_the_run_is(run_s: float) -> None:
    seen = observed.make_observation(expected_s=100.0, num_blocks=1)
    taken = []
    for now_s in np.arange(0.0, run_s, 0.25):
        if observed.is_snapshot_due(seen, now_s):
            # The kind tells when it was taken, so that a column cannot be moved without its time.
            observed.count_slots(seen, len(taken) % 6, 0, 1, 1)
            observed.take_snapshot(seen, now_s)
            taken.append(float(now_s))
    shown = observed.memory_map(seen, num_slots=1)
    times = shown.time_s.tolist()
    assert times[0] == 0.0
    assert len(times) <= 256
    assert len(times) > 100 or times == taken
    assert shown.kind[0].tolist() == [taken.index(t) % 6 for t in times]
    gaps = np.diff([*times, run_s])
    assert gaps.max() <= 2 * seen.times[observed.SNAPSHOT_S] + 0.25
    assert gaps[:-1].min() > 0
