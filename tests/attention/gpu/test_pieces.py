"""Batches cut into pieces, beside the rows and tokens that they are to cover."""

from __future__ import annotations

import heapq
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch", reason="needs the extra [engine]")
pytest.importorskip("triton", reason="needs triton")

import torch

from pagedkv.attention.gpu import pieces
from pagedkv.attention.gpu.plan import Cut, DecodePlan, Machine, Plan
from pagedkv.attention.gpu.tiles import LayerKind
from pagedkv.attention.reference import first_attended

BLOCK_SIZE = 16
NUM_BLOCKS = 50_000


def machine(num_processors: int = 132) -> Machine:
    return Machine(
        torch.device("cpu"), NUM_BLOCKS, BLOCK_SIZE, num_processors, 227 * 1024, torch.empty
    )


def kind(**changes: Any) -> LayerKind:
    given_sizes = {
        "num_kv_heads": 8, "heads_each": 4, "key_dim": 128, "value_dim": 128, "window": 0,
        "chunk": 0, "is_half": True, **changes,
    }  # fmt: skip
    return LayerKind(**given_sizes)


def tables_for(lengths: Any) -> Any:
    width = max([1, *(-(-int(length) // BLOCK_SIZE) for length in lengths)])
    return np.zeros((len(lengths), width), dtype=np.int32)


def check_cover(cut: Cut, of: LayerKind, lengths: Any, starts: Any, *, padding: int = 0) -> None:
    """Each row once a token that it sees, parts in places of their own, entries that find them."""
    packed = [-(-n // BLOCK_SIZE) * (b > a) for n, (a, b) in zip(lengths, pairwise(starts))]
    tables = np.cumsum([0, *packed])
    seen: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    token_of = {int(start): i for i, start in enumerate(starts[:-1]) if starts[i + 1] > start}
    found_padding = set()
    entries: dict[tuple[int, int], tuple[int, ...]] = {}
    for launch in cut.launches:
        tile = launch.tile
        places: set[int] = set()
        for piece in launch.pieces.tolist():
            table, token, before, first_row, num_rows, first, stop, place = piece
            if not num_rows:
                continue
            assert 0 < num_rows <= tile.rows
            if token >= starts[-1]:
                assert first == stop and place == -1
                found_padding |= {(token, row) for row in range(first_row, first_row + num_rows)}
                continue
            sequence = token_of[token]
            assert table == tables[sequence]
            assert before == lengths[sequence] - (starts[sequence + 1] - starts[sequence])
            # Nothing is read that no row of the piece sees.
            earliest = before + first_row // of.heads_each
            latest = before + (first_row + num_rows - 1) // of.heads_each
            assert first_attended(earliest, of.window or None, of.chunk or None) <= first < stop
            assert stop <= latest + 1
            for row in range(first_row, first_row + num_rows):
                own_place = place + row - first_row if place >= 0 else -1
                seen.setdefault((sequence, row), []).append((first, stop, own_place))
            if place >= 0:
                own = set(range(place, place + num_rows))
                assert not places & own
                places |= own
                assert max(own) < len(cut.part_scores) // of.num_kv_heads
        for place, parts, stride, token, each in launch.entries.tolist():
            if parts:
                assert (token, each) not in entries
                entries[token, each] = tuple(place + part * stride for part in range(parts))
    for sequence, (start, stop) in enumerate(pairwise(starts)):
        for row in range((stop - start) * of.heads_each):
            spans = sorted(seen.pop((sequence, row)))
            position = lengths[sequence] - (stop - start) + row // of.heads_each
            first = first_attended(position, of.window or None, of.chunk or None)
            # Spans follow one another without gap or overlap, around all that the row sees.
            assert spans[0][0] <= first and spans[-1][1] > position
            assert all(left[1] == right[0] for left, right in pairwise(spans))
            own = entries.pop((start + row // of.heads_each, row % of.heads_each), None)
            if len(spans) == 1:
                assert spans[0][2] == -1 and own is None
            else:
                assert own is not None
                assert sorted(own) == sorted(place for _, _, place in spans)
    assert not seen and not entries
    assert found_padding == {
        (starts[-1] + i, row) for i in range(padding) for row in range(of.heads_each)
    }


@st.composite
def kinds(draw: Any) -> LayerKind:
    dim = draw(st.sampled_from([16, 64, 128, 256]))
    return kind(
        num_kv_heads=draw(st.sampled_from([1, 2, 8])),
        heads_each=draw(st.sampled_from([1, 3, 4, 8, 20, 71])),
        key_dim=dim,
        value_dim=dim,
        window=draw(st.sampled_from([0, 0, 1, 100, 4096])),
        chunk=draw(st.sampled_from([0, 0, 700])),
        is_half=draw(st.booleans()),
    )


LENGTHS = st.one_of(st.integers(1, 50), st.integers(1, 5000), st.just(100_000))


@given(data=st.data())
def test_pieces_cover_every_row_of_a_mixed_batch_once(data: st.DataObject) -> None:
    of = data.draw(kinds())
    lengths = data.draw(st.lists(LENGTHS, max_size=12))
    new = [data.draw(st.integers(0, min(length, 150))) for length in lengths]
    starts = np.cumsum([0, *new])
    plan = Plan(
        tables_for(lengths), np.array(lengths, np.int64), starts,
        machine=machine(data.draw(st.sampled_from([4, 132]))), kinds=[of],
    )  # fmt: skip
    check_cover(plan.cut(of), of, lengths, starts.tolist())


@given(data=st.data())
def test_a_fixed_plan_holds_whatever_it_was_made_for(data: st.DataObject) -> None:
    of = data.draw(kinds())
    max_sequences = data.draw(st.integers(1, 40))
    here = machine(data.draw(st.sampled_from([4, 132])))
    plan = DecodePlan(max_sequences, 6250, machine=here, kinds=[of])
    cut = plan.cut(of)
    addresses = [launch.pieces.data_ptr() for launch in cut.launches]
    sizes = [(len(launch.pieces), len(launch.entries)) for launch in cut.launches]
    for _ in range(3):
        lengths = data.draw(st.lists(LENGTHS, max_size=max_sequences))
        plan.update(tables_for(lengths), np.array(lengths, np.int64))
        padding = max_sequences - len(lengths)
        check_cover(plan.cut(of), of, lengths, list(range(len(lengths) + 1)), padding=padding)
    assert addresses == [launch.pieces.data_ptr() for launch in plan.cut(of).launches]
    assert sizes == [(len(launch.pieces), len(launch.entries)) for launch in plan.cut(of).launches]


@given(
    lengths=st.lists(LENGTHS, min_size=1, max_size=30),
    heads=st.sampled_from([1, 8]),
    num_programs=st.sampled_from([8, 396]),
    most_extra=st.integers(0, 40),
)
def test_cutting_adds_no_more_pieces_than_it_may(
    lengths: list[int], heads: int, num_programs: int, most_extra: int
) -> None:
    made, entries, places = pieces.cut(
        np.array(lengths, np.int64), np.arange(len(lengths) + 1), BLOCK_SIZE, heads, 4, 0, 0, 0,
        -16, 64, num_programs, most_extra,
    )  # fmt: skip
    assert len(lengths) <= len(made) <= len(lengths) + most_extra
    assert len(entries) <= 4 * most_extra
    assert places <= 4 * 2 * most_extra


def test_a_fixed_plan_has_room_for_the_parts_of_all_that_can_be_cut() -> None:
    """14 sequences for 12 programs: each in two halves, which 3 rounds of programs compute."""
    of = kind(num_kv_heads=1)
    lengths = np.full(14, 30_000)
    plan = DecodePlan(14, 1875, machine=machine(4), kinds=[of])
    plan.update(tables_for(lengths), lengths)
    check_cover(plan.cut(of), of, lengths.tolist(), list(range(15)))
    (launch,) = plan.cut(of).launches
    assert int((launch.pieces[:, pieces.PLACE] >= 0).sum()) >= 24


def test_one_long_sequence_among_many_short_is_spread_over_the_device() -> None:
    lengths = np.array([100_000, *[10] * 200])
    of = kind()
    for plan in (
        Plan(tables_for(lengths), lengths, np.arange(202), machine=machine(), kinds=[of]),
        DecodePlan(201, 6250, machine=machine(), kinds=[of]),
    ):
        if isinstance(plan, DecodePlan):
            plan.update(tables_for(lengths), lengths)
        cut = plan.cut(of)
        (launch,) = cut.launches
        check_cover(cut, of, lengths.tolist(), list(range(202)))
        spans = launch.pieces[:, pieces.STOP] - launch.pieces[:, pieces.FIRST]
        # A program for each of 8 heads: with 132 * 3 at a time, a fair share is some 2,000 tokens.
        assert int(spans.max()) <= 2 * 100_000 * 8 / (132 * launch.tile.programs_each)


@pytest.mark.parametrize("batch", [1, 3, 8, 33, 64])
def test_equal_sequences_fill_the_device_in_whole_rounds(batch: int) -> None:
    lengths = np.full(batch, 32_768)
    of = kind()
    plan = Plan(tables_for(lengths), lengths, np.arange(batch + 1), machine=machine(), kinds=[of])
    (launch,) = plan.cut(of).launches
    at_a_time = 132 * launch.tile.programs_each
    rounds = -(-len(launch.pieces) * 8 // at_a_time)
    span = int((launch.pieces[:, pieces.STOP] - launch.pieces[:, pieces.FIRST]).max())
    assert rounds * span <= 1.35 * batch * 32_768 * 8 / at_a_time


def test_the_longest_pieces_come_first() -> None:
    lengths = np.array([5, 4000, 70, 900])
    of = kind()
    plan = Plan(tables_for(lengths), lengths, np.arange(5), machine=machine(), kinds=[of])
    (launch,) = plan.cut(of).launches
    spans = (launch.pieces[:, pieces.STOP] - launch.pieces[:, pieces.FIRST]).tolist()
    assert spans == sorted(spans, reverse=True)


def test_few_queries_of_a_sequence_share_one_program() -> None:
    """Up to 4 tokens of 4 heads fit a program of 16 rows, as one does; more take larger tiles."""
    for new, rows in ((1, 16), (4, 16), (5, 64), (16, 64), (17, 128), (300, 128)):
        plan = Plan(
            tables_for([400]), np.array([400]), np.array([0, new]), machine=machine(),
            kinds=[kind()],
        )  # fmt: skip
        (launch,) = plan.cut(kind()).launches
        assert launch.tile.rows == rows


def test_what_a_fixed_plan_has_no_room_for_is_refused_and_leaves_it_as_it_was() -> None:
    plan = DecodePlan(2, 3, machine=machine(), kinds=[kind()])
    plan.update(tables_for([40, 20]), np.array([40, 20]))
    before = plan._regions[0].there.clone()
    with pytest.raises(ValueError, match="3 sequences: this plan has room for 2"):
        plan.update(tables_for([1, 1, 1]), np.array([1, 1, 1]))
    with pytest.raises(ValueError, match="have 7 blocks: this plan has room for 2 times 3"):
        plan.update(tables_for([100]), np.array([100]))
    with pytest.raises(ValueError, match="a block outside 0 to 49999"):
        plan.update(np.full((1, 3), -1, np.int32), np.array([20]))
    with pytest.raises(ValueError, match="holds nothing"):
        DecodePlan(0, 3, machine=machine(), kinds=[])
    assert torch.equal(plan._regions[0].there, before)


def dealt(plan: Plan, of: LayerKind, here: Machine) -> tuple[float, float]:
    """When a batch of decodes ends that is dealt out piece by piece, longest first, and the mean of
    what all programs read; both in tokens."""
    [launch] = plan.cut(of).launches
    sizes = (launch.pieces[:, pieces.STOP] - launch.pieces[:, pieces.FIRST]).tolist()
    assert sizes == sorted(sizes, reverse=True)
    num_programs = here.num_processors * launch.tile.programs_each
    free_at = [0] * (num_programs // of.num_kv_heads)
    for size in sizes:
        heapq.heapreplace(free_at, free_at[0] + size + pieces._STARTING)
    return max(free_at), sum(sizes) * of.num_kv_heads / num_programs


LONG_ENOUGH = 4096


@pytest.mark.parametrize("num", [*range(7, 257, 31), 50, 100, 101, 149, 150, 151, 199, 200, 256])
@pytest.mark.parametrize("length", [LONG_ENOUGH, 32_768])
def test_no_round_of_a_batch_of_long_contexts_is_left_nearly_empty(num: int, length: int) -> None:
    """Uncut, 100 contexts on a device that reads 49 at a time take three rounds for two."""
    of, here = kind(), machine()
    lengths = np.full(num, length, dtype=np.int64)
    plan = Plan(tables_for(lengths), lengths, np.arange(num + 1), machine=here, kinds=[of])
    end, mean = dealt(plan, of, here)
    assert end < 1.4 * mean
    uncut = -(-num // (here.num_processors * 3 // of.num_kv_heads)) * (length + pieces._STARTING)
    assert end <= 1.05 * uncut


@given(data=st.data())
def test_a_batch_never_ends_later_for_being_cut(data: st.DataObject) -> None:
    of, here = kind(num_kv_heads=data.draw(st.sampled_from([1, 2, 8]))), machine()
    kinds_of_length = st.integers(1, 50) | st.integers(900, 1100) | st.sampled_from([4096, 30_000])
    lengths = np.array(data.draw(st.lists(kinds_of_length, min_size=1, max_size=256)), np.int64)
    plan = Plan(tables_for(lengths), lengths, np.arange(len(lengths) + 1), machine=here, kinds=[of])
    end, _ = dealt(plan, of, here)
    # As many pieces as sequences, and three rounds of the device.
    [launch] = plan.cut(of).launches
    most = len(lengths) + here.most_extra(of, launch.tile)
    assert len(launch.pieces) <= most
    assert here.most_extra(of, launch.tile) * of.num_kv_heads < 3 * 132 * 3 + of.num_kv_heads
    free_at = [0] * (here.num_processors * launch.tile.programs_each // of.num_kv_heads)
    for length in sorted(lengths.tolist(), reverse=True):
        heapq.heapreplace(free_at, free_at[0] + length + pieces._STARTING)
    assert end <= max(free_at)


def test_three_that_are_left_over_do_not_cost_a_round() -> None:
    """Two long contexts among 48 of 1,000 tokens: the last of these would end alone."""
    of, here = kind(), machine()
    lengths = np.array([30_000] * 2 + [1000] * 46, dtype=np.int64)
    plan = Plan(tables_for(lengths), lengths, np.arange(49), machine=here, kinds=[of])
    end, mean = dealt(plan, of, here)
    assert end < 1.3 * mean
