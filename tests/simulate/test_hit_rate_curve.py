from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.lru import lru_hits_at
from pagedkv.errors import InvalidInput
from pagedkv.simulate.hit_rate_curve import hit_rate_curve, lru_hits

MOONCAKE = Path(__file__).parents[2].parent / "shared/traces/mooncake_conversation.jsonl"

# Prefixes that come again, which the pass treats in a way of its own, between single accesses.
runs = st.lists(
    st.one_of(
        st.tuples(st.integers(0, 12), st.integers(1, 40)).map(
            lambda run: list(range(run[0], run[0] + run[1]))
        ),
        st.lists(st.integers(0, 60), max_size=5),
    ),
    max_size=25,
)


def flat(runs: list[list[int]]) -> np.ndarray:
    return np.array([block for run in runs for block in run], np.int64)


def as_keys(ids: np.ndarray) -> np.ndarray:
    """Each id in the half of the key that its parity chooses, so that both halves matter."""
    keys = np.zeros((len(ids), 2), np.uint64)
    keys[np.arange(len(ids)), ids % 2] = ids.astype(np.uint64) + np.uint64(2**63)
    return keys


@given(runs=runs)
@settings(max_examples=120, deadline=None)
def test_every_size_hits_as_often_as_an_lru_memory_that_is_replayed(runs):
    ids = flat(runs)
    hits = lru_hits(ids)
    distinct = len(set(ids.tolist()))
    assert hits.tolist() == [lru_hits_at(ids.tolist(), size) for size in range(distinct + 1)]


@given(runs=runs)
@settings(max_examples=60, deadline=None)
def test_what_blocks_are_called_does_not_matter(runs):
    ids = flat(runs)
    expected = lru_hits(ids)
    np.testing.assert_array_equal(lru_hits(as_keys(ids)), expected)
    for rename in (lambda i: -i, lambda i: i << 40, lambda i: (i << 32) | i, lambda i: i * 16):
        np.testing.assert_array_equal(lru_hits(rename(ids)), expected)


def test_many_blocks_and_a_table_that_grows_lose_no_access():
    rng = np.random.default_rng(5)
    ids = np.concatenate(
        [np.arange(start, start + 300) for start in rng.integers(0, 6_000, 60)]
        + [rng.integers(-(2**62), 2**62, 2_000)]
        + [np.arange(3_000)]
    )
    hits = lru_hits(ids)
    distinct = len(np.unique(ids))
    assert len(hits) == distinct + 1
    assert hits[-1] == len(ids) - distinct
    for size in (0, 1, 299, 300, 1_000, 2_500, 5_000, distinct):
        assert hits[size] == lru_hits_at(ids.tolist(), size)


@pytest.mark.heavy
@pytest.mark.skipif(not MOONCAKE.exists(), reason="the Mooncake conversation trace is not here")
def test_the_mooncake_conversation_trace_hits_as_published():
    ids = []
    with MOONCAKE.open() as lines:
        for line in lines:
            ids += json.loads(line)["hash_ids"]
    curve = hit_rate_curve(np.array(ids), block_size=512)
    assert (curve.block_size, curve.accesses, curve.distinct) == (512, 288_500, 182_790)
    assert round(100 * curve.ceiling, 4) == 36.6412
    hits = lru_hits(np.array(ids))
    assert round(100 * hits[4_096] / len(ids), 4) == 8.7553
    assert round(100 * hits[16_384] / len(ids), 4) == 26.5556
    for size in (1, 64, 1_024, 4_096, 16_384, 65_536, 150_000, 182_790):
        assert hits[size] == lru_hits_at(ids, size)
    assert hits[curve.smallest[0.5]] >= hits[-1] / 2 > hits[curve.smallest[0.5] - 1]
    assert curve.smallest[1.0] == 158_282


def test_the_example_of_the_module_comes_out():
    assert lru_hits(np.array([0, 1, 2, 1, 1, 0])).tolist() == [0, 1, 2, 3]


def test_the_curve_names_the_smallest_memory_for_each_share_of_the_ceiling():
    # Distances: blocks 0 and 1 hit with 2 blocks, four times; block 2 with 3 blocks, once.
    ids = np.array([2, 0, 1, 0, 1, 2, 0, 1])
    curve = hit_rate_curve(ids, block_size=16)
    assert lru_hits(ids).tolist() == [0, 0, 2, 5]
    assert curve.smallest == {0.5: 3, 0.8: 3, 0.95: 3, 1.0: 3}
    assert curve.blocks.tolist() == [2, 3]
    assert curve.hit_rate.tolist() == [2 / 8, 5 / 8]
    assert curve.ceiling == 5 / 8


def test_half_the_ceiling_is_reached_by_exactly_half_of_the_hits():
    ids = np.array([0, 0, 1, 2, 1])  # one hit with 1 block, one more with 2
    assert hit_rate_curve(ids, block_size=1).smallest == {0.5: 1, 0.8: 2, 0.95: 2, 1.0: 2}


def test_a_trace_that_never_hits_has_a_flat_curve_and_no_smallest_memory():
    curve = hit_rate_curve(np.arange(50), block_size=16)
    assert curve.ceiling == 0
    assert curve.smallest == {}
    assert curve.hit_rate.tolist() == [0]


def test_a_long_curve_is_thinned_to_points_that_lie_on_it_with_both_ends():
    rng = np.random.default_rng(1)
    ids = np.floor(np.exp(rng.uniform(0, 10, 40_000))).astype(np.int64)
    curve = hit_rate_curve(ids, block_size=16)
    hits = lru_hits(ids)
    changes = np.flatnonzero(np.diff(hits)) + 1
    assert len(changes) > 2_100 > 2_002 >= len(curve.blocks) > 1_000
    assert (np.diff(curve.blocks) > 0).all()
    np.testing.assert_array_equal(curve.hit_rate, hits[curve.blocks] / len(ids))
    assert (curve.blocks[0], curve.blocks[-1]) == (changes[0], changes[-1])
    assert curve.hit_rate[-1] == curve.ceiling
    assert np.diff(curve.hit_rate).max() <= 2 * np.diff(hits).max() / len(ids) + 0.002


def test_ids_that_are_no_block_ids_are_refused():
    for wrong in (np.zeros(3), np.zeros((3, 2), np.int64), np.zeros((3, 3), np.uint64)):
        with pytest.raises(InvalidInput, match="block ids are int64"):
            hit_rate_curve(wrong, block_size=16)
    with pytest.raises(InvalidInput, match="no block accesses"):
        hit_rate_curve(np.zeros(0, np.int64), block_size=16)
    with pytest.raises(InvalidInput, match="block_size"):
        hit_rate_curve(np.zeros(3, np.int64), block_size=0)
