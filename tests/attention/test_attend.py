from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.attention_batches import options, sequences
from models.attention_model import (
    fill_with_nan,
    paged_batch,
    relative_error,
    rounded,
    slots_of,
)
from pagedkv.attention import KVStorage, LayerShape, reference_attend
from pagedkv.errors import InvalidInput

# A shape costs a compilation: few, and each for a reason. (KV heads, heads each, key, value).
SHAPES = {
    "one head each": (2, 1, 16, 16),
    "grouped, values wider than keys": (1, 2, 24, 40),
    "grouped by three": (2, 3, 64, 64),
    "more heads than fit one vector": (1, 20, 8, 16),
}
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 2e-3}


@pytest.mark.parametrize("shape", SHAPES)
@given(data=st.data())
def test_any_ragged_batch_is_attended_to_as_by_the_book(shape: str, data: st.DataObject) -> None:
    num_kv_heads, heads_each, key_dim, value_dim = SHAPES[shape]
    batch = paged_batch(
        np.random.default_rng(data.draw(st.integers(0, 1000))),
        data.draw(sequences(lengths=st.integers(1, 70))),
        block_size=data.draw(st.sampled_from([1, 2, 3, 4, 7, 16, 128, 256])),
        shape=LayerShape(num_kv_heads, key_dim, value_dim),
        heads_each=heads_each,
        loudness=data.draw(st.sampled_from([0.1, 1.0, 4.0])),
    )
    some = data.draw(options(num_kv_heads * heads_each, key_dim=key_dim))
    assert relative_error(batch.attend(**some), batch.expected(**some)) < TOLERANCE["float32"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@given(data=st.data())
def test_half_precision_is_only_as_imprecise_as_its_storage(
    dtype: str, data: st.DataObject
) -> None:
    batch = paged_batch(
        np.random.default_rng(data.draw(st.integers(0, 1000))),
        data.draw(sequences(lengths=st.integers(1, 70))),
        block_size=data.draw(st.sampled_from([1, 3, 16])),
        shape=LayerShape(2, 16, 16),
        heads_each=2,
        dtype=dtype,
    )
    some = data.draw(options(4, key_dim=16))
    expected = batch.expected(**some)
    # Float32 queries over half-precision keys: nothing more is lost.
    assert relative_error(batch.attend(**some), expected) < TOLERANCE["float32"]
    if dtype == "float16":
        batch.q = batch.q.astype(np.float16)
        half = batch.attend(**some)
        assert half.dtype == np.float16
        assert relative_error(half, batch.expected(**some)) < TOLERANCE[dtype]


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((1, 4, 128, 128), "bfloat16"),
        ((1, 1, 576, 512), "float32"),
        ((1, 8, 40, 56), "float16"),
        ((1, 5, 80, 8), "float32"),
    ],
)
def test_head_sizes_and_groups_of_real_models(shape: tuple[int, ...], dtype: str) -> None:
    num_kv_heads, heads_each, key_dim, value_dim = shape
    batch = paged_batch(
        np.random.default_rng(0),
        [(2500, 1), (300, 40), (1, 1), (5000, 3), (1024, 1), (1025, 1)],
        shape=LayerShape(num_kv_heads, key_dim, value_dim),
        heads_each=heads_each,
        dtype=dtype,
    )
    for some in ({}, {"window": 1100, "soft_cap": 30.0, "sinks": np.ones(heads_each)}):
        assert relative_error(batch.attend(**some), batch.expected(**some)) < TOLERANCE["float32"]


@pytest.mark.parametrize("new", [1, 30])
@pytest.mark.parametrize("garbage", [np.nan, np.inf, -np.inf])
def test_what_lies_in_slots_of_nobody_changes_no_bit(garbage: float, new: int) -> None:
    batch = paged_batch(np.random.default_rng(1), [(37, new), (50, new)], block_size=8)
    before = batch.attend(window=20)
    used = [slots_of(batch.block_tables[i], 0, int(n), 8) for i, n in enumerate(batch.lengths)]
    storage = batch.storage
    free = np.setdiff1d(np.arange(storage.num_blocks * 8), np.concatenate(used))
    k = np.full((len(free), 2, 16), garbage, dtype=np.float32)
    storage.write(1, k, k, free)
    # The first tokens are out of the window of every query: their blocks may be others' by now.
    gone = used[0][: max(0, 37 - new - 20 + 1)]
    storage.write(1, k[: len(gone)], k[: len(gone)], gone)
    assert np.array_equal(batch.attend(window=20), before)


def test_a_table_may_hold_anything_before_the_window() -> None:
    batch = paged_batch(np.random.default_rng(1), [(37, 1)], block_size=4)
    before = batch.attend(window=5)
    batch.block_tables[0, :8] = -1
    assert np.array_equal(batch.attend(window=5), before)


def test_forks_share_blocks_and_go_their_own_ways_after_a_copy() -> None:
    rng = np.random.default_rng(2)
    parent = paged_batch(rng, [(22, 1)], block_size=8)
    storage, table = parent.storage, parent.block_tables[0]
    last = min(set(range(storage.num_blocks)) - set(table[:3].tolist()))
    storage.copy_blocks(np.array([[table[2], last]], dtype=np.int32))
    child = parent.alone(0)
    child.block_tables = np.array([[table[0], table[1], last]], dtype=np.int32)
    for one in (parent, child):
        k, v = rng.standard_normal((2, 1, 2, 16), dtype=np.float32)
        storage.write(1, k, v, slots_of(one.block_tables[0], 22, 23, 8))
        one.k, one.v = [np.concatenate([one.k[0], k])], [np.concatenate([one.v[0], v])]
        one.lengths = np.array([23])
    for one in (parent, child):
        assert relative_error(one.attend(), one.expected()) < TOLERANCE["float32"]


@pytest.mark.parametrize("block_size", [1, 16, 256])
def test_neither_batch_nor_threads_nor_block_size_change_a_bit(block_size: int) -> None:
    cases = [(1100, 1), (300, 40), (64, 64), (1, 1), (2100, 2), (9, 0)]
    results = []
    for num_threads in (1, 4):
        batch = paged_batch(
            np.random.default_rng(3), cases, block_size=block_size, num_threads=num_threads
        )
        results.append(batch.attend())
    assert np.array_equal(results[0], results[1])
    assert relative_error(results[0], batch.expected()) < TOLERANCE["float32"]
    for i in range(len(cases)):
        start, stop = batch.query_starts[i : i + 2]
        assert np.array_equal(batch.alone(i).attend(), results[0][start:stop])
    if block_size != 16:
        same = paged_batch(np.random.default_rng(3), cases, block_size=16)
        same.q, k, v = batch.q, batch.k, batch.v
        for i, length in enumerate(batch.lengths):
            same.storage.write(1, k[i], v[i], slots_of(same.block_tables[i], 0, int(length), 16))
        assert np.array_equal(same.attend(), results[0])


@pytest.mark.heavy
def test_many_threads_lose_no_piece() -> None:
    batch = paged_batch(
        np.random.default_rng(4), [(1 + 37 * i, 1 + i % 3) for i in range(60)], num_threads=8
    )
    first = batch.attend()
    assert relative_error(first, batch.expected()) < TOLERANCE["float32"]
    for _ in range(200):
        assert np.array_equal(batch.attend(), first)


def test_a_chunked_prompt_gives_what_the_whole_gives() -> None:
    batch = paged_batch(np.random.default_rng(5), [(120, 120)])
    whole = batch.attend()
    for start, stop in ((0, 50), (50, 51), (51, 120)):
        part = batch.alone(0)
        part.q, part.lengths = batch.q[start:stop], np.array([stop])
        part.query_starts = np.array([0, stop - start])
        np.testing.assert_allclose(part.attend(), whole[start:stop], rtol=1e-5, atol=1e-6)


def test_a_cap_far_above_the_scores_costs_no_digits() -> None:
    batch = paged_batch(np.random.default_rng(6), [(40, 1), (40, 30)])
    assert relative_error(batch.attend(soft_cap=1e4), batch.expected()) < TOLERANCE["float32"]


def test_weights_too_small_for_a_float_are_nothing() -> None:
    batch = paged_batch(np.random.default_rng(6), [(40, 1), (200, 150)], loudness=60.0)
    # Scores of some hundreds are themselves only exact to some 1e-5.
    assert relative_error(batch.attend(), batch.expected()) < 2e-4


@pytest.mark.parametrize("new", [1, 30])
def test_scores_so_low_that_none_alone_would_be_more_than_nothing(new: int) -> None:
    batch = paged_batch(np.random.default_rng(6), [(40, new)])
    batch.k[0] = np.abs(batch.k[0]) + 1
    batch.q = -(np.abs(batch.q) + 1)
    batch.storage.write(1, batch.k[0], batch.v[0], slots_of(batch.block_tables[0], 0, 40, 16))
    for scale in (1.0, 100.0):  # scores of some -50, and of some -5,000
        found, expected = batch.attend(scale=scale), batch.expected(scale=scale)
        assert relative_error(found, expected) < 1e-2


@pytest.mark.parametrize("loud", [slice(0, 50), slice(1030, 1100)])
def test_parts_of_a_context_whose_scores_are_far_apart(loud: slice) -> None:
    batch = paged_batch(np.random.default_rng(6), [(1100, 1)])
    batch.k[0][loud] *= 200
    batch.storage.write(1, batch.k[0], batch.v[0], slots_of(batch.block_tables[0], 0, 1100, 16))
    assert relative_error(batch.attend(), batch.expected()) < 1e-2


@pytest.mark.parametrize("some", [{"window": 130}, {"window": 300}, {"chunk": 130}, {"chunk": 300}])
def test_windows_and_chunks_longer_than_what_is_read_at_once(some: dict[str, int]) -> None:
    batch = paged_batch(np.random.default_rng(6), [(400, 150), (260, 1), (301, 301)], block_size=7)
    assert relative_error(batch.attend(**some), batch.expected(**some)) < TOLERANCE["float32"]


def test_an_output_given_is_written_and_returned() -> None:
    batch = paged_batch(np.random.default_rng(6), [(20, 3)])
    room = np.full((3, 5, 24), 7, dtype=np.float32)
    out = room[:, 1:3, 4:20]
    assert batch.attend(out=out) is out
    assert np.array_equal(out, batch.attend())
    room[:, 1:3, 4:20] = 7
    assert (room == 7).all()


@pytest.mark.parametrize("new", [1, 20])
def test_queries_are_read_where_they_lie(new: int) -> None:
    batch = paged_batch(np.random.default_rng(7), [(40, new), (30, new)], heads_each=2)
    expected = batch.attend()
    plain = batch.q
    fused = np.full((2 * new, 6, 40), np.nan, dtype=np.float32)
    fused[:, 1:5, 8:24] = plain
    heads_first = np.ascontiguousarray(plain.transpose(1, 0, 2)).transpose(1, 0, 2)
    frozen = plain.copy()
    frozen.flags.writeable = False
    for q in (fused[:, 1:5, 8:24], heads_first, np.asfortranarray(plain), frozen):
        batch.q = q
        assert np.array_equal(batch.attend(), expected)


def test_a_batch_planned_once_serves_every_layer_with_every_option() -> None:
    rng = np.random.default_rng(8)
    storage = KVStorage(140, 16, [LayerShape(2, 16, 16)] * 2 + [LayerShape(1, 16, 16)])
    table = rng.permutation(140).astype(np.int32)[None]
    slots = slots_of(table[0], 0, 2200, 16)
    for layer, heads in ((0, 2), (1, 2), (2, 1)):
        k, v = rng.standard_normal((2, 2200, heads, 16), dtype=np.float32)
        storage.write(layer, k, v, slots)
    q = rng.standard_normal((2, 2, 16), dtype=np.float32)
    batch = (table, [2200], [0, 2])
    plan = storage.plan(*batch)
    many: list[dict[str, Any]] = [{}, {"sinks": np.ones(2)}, {"window": 1500}, {"soft_cap": 2.0}]
    for some in many:
        for layer in (0, 1, 2, 0):
            found = storage.attend_planned(layer, q, plan, **some)
            assert np.array_equal(found, storage.attend(layer, q, *batch, **some))
    assert np.array_equal(
        storage.attend_planned(1, q[:, ::-1], plan), storage.attend(1, q[:, ::-1], *batch)
    )


def test_batches_in_which_nobody_asks() -> None:
    batch = paged_batch(np.random.default_rng(8), [(20, 0), (3, 0)])
    assert batch.attend().shape == (0, 2, 16)
    nobody = batch.storage.attend(
        1, batch.q, np.empty((0, 3), np.int32), np.empty(0, np.int64), np.zeros(1, np.int64)
    )
    assert nobody.shape == (0, 2, 16)


def test_more_than_65536_numbers_a_block_and_2_to_the_31_in_all() -> None:
    shape = LayerShape(4, 64, 64)
    block_size = 256
    num_blocks = 2**31 // (block_size * 512) + 3
    storage = KVStorage(num_blocks, block_size, [shape], dtype="bfloat16")
    assert storage.data.shape[1] > 65_536
    assert storage.data.size > 2**31
    rng = np.random.default_rng(9)
    k, v = rng.standard_normal((2, 300, 4, 64), dtype=np.float32)
    table = np.array([num_blocks - 1, num_blocks - 3], dtype=np.int32)
    storage.write(0, k, v, slots_of(table, 0, 300, block_size))
    storage.copy_blocks([[num_blocks - 3, num_blocks - 2]])
    k, v = rounded(k, "bfloat16"), rounded(v, "bfloat16")
    for new in (1, 30):
        q = rng.standard_normal((new, 4, 64), dtype=np.float32)
        for last in (num_blocks - 3, num_blocks - 2):
            table[1] = last
            out = storage.attend(0, q, table[None], [300], [0, new])
            assert relative_error(out, reference_attend(q, k, v)) < TOLERANCE["float32"]


class TestBadInput:
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"q": np.ones((3, 3, 16), np.float32)}, "3 heads do not share 2 KV heads"),
            ({"q": np.ones((3, 2, 8), np.float32)}, r"q has shape \[3, 2, 8\]"),
            ({"q": np.ones((3, 2, 16))}, "q is float64: give float32$"),
            ({"lengths": np.array([2])}, r"lengths\[0\] is below the number of its queries"),
            ({"lengths": np.array([49])}, r"block_tables\[0\] has fewer than"),
            ({"lengths": np.array([20.0])}, "lengths must be integers"),
            ({"block_tables": np.array([[1, 9]], np.int32)}, "a block outside 0 to 3"),
            ({"block_tables": np.array([[-1, 1]], np.int32)}, "a block outside 0 to 3"),
            ({"block_tables": np.array([[1, 2**32]])}, "a block outside 0 to 3"),
            ({"block_tables": np.array([[2**33 + 1, 1]])}, "a block outside 0 to 3"),
            ({"block_tables": np.array([[2**64 - 1, 1]], np.uint64)}, "a block outside 0 to 3"),
            ({"block_tables": [[1, 2], [3]]}, "block_tables is no array"),
            ({"block_tables": np.ones((2, 2), np.int32)}, "a row for each of 1 lengths"),
            ({"query_starts": np.array([0, 2])}, "q has 3 tokens, but query_starts ends with 2"),
            ({"query_starts": np.array([1, 3])}, "query_starts must begin with 0"),
            ({"query_starts": np.array([[0, 3]])}, r"query_starts has shape \[1, 2\]"),
            ({"query_starts": []}, "query_starts must begin with 0"),
            ({"query_starts": np.array([0, 4, 3])}, "query_starts must .* have one entry more"),
        ],
    )
    def test_of_a_batch(self, change: dict[str, Any], message: str) -> None:
        batch = paged_batch(np.random.default_rng(0), [(20, 3)])
        for name, value in change.items():
            setattr(batch, name, value)
        out = np.full((3, 2, 16), 7, dtype=np.float32)
        with pytest.raises(ValueError, match=message) as caught:
            batch.attend(out=out)
        assert "\n" not in str(caught.value)
        assert (out == 7).all()

    @pytest.mark.parametrize(
        ("some", "message"),
        [
            ({"window": 0}, "window must be at least 1"),
            ({"chunk": -3}, "chunk must be at least 1"),
            ({"window": 1.5}, "window is 1.5: give an integer"),
            ({"window": 10**30}, "window must be at most"),
            ({"chunk": "8"}, "chunk is '8': give an integer"),
            ({"chunk": True}, "chunk is True: give an integer"),
            ({"soft_cap": 0.0}, "soft_cap must be above 0"),
            ({"soft_cap": np.inf}, "soft_cap is inf: give a number"),
            ({"scale": "1"}, "scale is '1': give a number"),
            ({"scale": np.nan}, "scale is nan: give a number"),
            ({"scale": -np.inf}, "scale is -inf: give a number"),
            ({"sinks": np.array([0.0, np.inf])}, "sinks hold inf or a NaN"),
            ({"sinks": np.array([np.nan, 0.0])}, "sinks hold inf or a NaN"),
            ({"sinks": ["a", "b"]}, "sinks are str32: give floats"),
            ({"sinks": np.ones(3)}, r"sinks has shape \[3\], not \[2\]"),
            ({"out": np.ones((3, 2, 8), np.float32)}, "out must be float32"),
            ({"out": np.ones((3, 2, 16), np.float16)}, "out must be float32"),
            ({"out": np.ones((3, 2, 32), np.float32)[:, :, ::2]}, "contiguous last axis"),
        ],
    )
    def test_of_options(self, some: dict[str, Any], message: str) -> None:
        batch = paged_batch(np.random.default_rng(0), [(20, 3)])
        with pytest.raises(ValueError, match=message):
            batch.attend(**some)

    def test_of_fewer_queries_than_are_told_of(self) -> None:
        batch = paged_batch(np.random.default_rng(0), [(20, 3)])
        batch.q = batch.q[:2]
        with pytest.raises(InvalidInput, match="q has 2 tokens, but query_starts ends with 3"):
            batch.attend()

    @pytest.mark.parametrize(
        ("layer", "message"),
        [
            (3, "no layer 3: this storage has 3"),
            (-1, "no layer -1"),
            (1.0, "layer is 1.0: give an integer"),
            (True, "layer is True: give an integer"),
        ],
    )
    def test_of_a_layer(self, layer: Any, message: str) -> None:
        batch = paged_batch(np.random.default_rng(0), [(20, 3)])
        batch.layer = layer
        with pytest.raises(InvalidInput, match=message):
            batch.attend()


def test_a_plan_serves_no_other_storage_however_alike() -> None:
    """A larger one's plan may name blocks that a smaller one does not have."""
    layers = [LayerShape(2, 16, 16)]
    storage, other = KVStorage(8, 16, layers), KVStorage(8, 16, layers)
    for made in (storage, other):
        fill_with_nan(made)
        made.write(0, *np.ones((2, 1, 2, 16), np.float32), [16])
    q = np.ones((1, 2, 16), np.float32)
    plan = storage.plan([[1]], [1], [0, 1])
    assert (storage.attend_planned(0, q, plan) == 1).all()
    with pytest.raises(InvalidInput, match="plan is made by another storage"):
        other.attend_planned(0, q, plan)
    for wrong in (None, [[1]]):
        with pytest.raises(InvalidInput, match=r"plan is \w+: give what `plan` of this storage"):
            storage.attend_planned(0, q, wrong)  # type: ignore[arg-type]


def test_wide_tables_may_hold_anything_that_nobody_reads() -> None:
    batch = paged_batch(np.random.default_rng(0), [(20, 3)])
    expected = batch.attend()
    batch.block_tables = batch.block_tables.astype(np.int64)
    batch.block_tables[0, 2:] = 2**40
    assert np.array_equal(batch.attend(), expected)


def test_a_sink_of_minus_infinity_is_none() -> None:
    batch = paged_batch(np.random.default_rng(0), [(20, 3)])
    sinks = np.array([-np.inf, -np.inf], np.float32)
    assert np.array_equal(batch.attend(sinks=sinks), batch.attend())


def test_a_window_and_a_chunk_let_see_what_both_do() -> None:
    batch = paged_batch(np.random.default_rng(0), [(40, 6)])
    both: dict[str, Any] = {"window": 5, "chunk": 12}
    assert relative_error(batch.attend(**both), batch.expected(**both)) < TOLERANCE["float32"]
    for one in both:
        assert not np.array_equal(batch.attend(**both), batch.attend(**{one: both[one]}))


def test_a_batch_of_nothing_may_be_of_lists() -> None:
    storage = KVStorage(2, 4, [LayerShape(1, 8, 8)])
    none = np.empty((0, 1, 8), np.float32)
    storage.write(0, none, none, [])
    storage.copy_blocks([])
    assert storage.attend(0, none, [], [], [0]).shape == (0, 1, 8)
    assert storage.read(0, [], 0)[0].shape == (0, 1, 8)


def test_the_storage_used_by_these_tests_is_full_of_nan() -> None:
    storage = KVStorage(2, 4, [LayerShape(1, 8, 8)], dtype="bfloat16")
    fill_with_nan(storage)
    assert all(np.isnan(part).all() for part in storage.read(0, [0, 1], 8))
