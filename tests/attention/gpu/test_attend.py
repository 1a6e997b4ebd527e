from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch", reason="needs the extra [engine]")
pytest.importorskip("triton", reason="needs triton")

import torch

from models.attention_batches import options, sequences
from models.attention_model import relative_error, slots_of
from models.gpu_batch import DEVICE, gpu_batch, put
from pagedkv.attention import KVStorage, LayerShape, reference_attend
from pagedkv.attention.gpu import GPUStorage
from pagedkv.attention.gpu import storage as storage_module

TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 2e-3}

# (KV heads, heads each, key size, value size): sizes that are no powers of two, groups that do
# not divide a tile, more heads than a tile of few rows has.
SHAPES = [
    (2, 1, 16, 16),
    (1, 2, 24, 40),
    (2, 3, 80, 80),
    (1, 5, 64, 64),
    (1, 20, 8, 16),
    (1, 8, 96, 96),
    (1, 7, 128, 128),
    (1, 4, 256, 256),
]


LENGTHS = st.integers(1, 70) | st.integers(100, 220)


@pytest.mark.parametrize("dtype", TOLERANCE)
@settings(max_examples=12)
@given(data=st.data())
def test_any_ragged_batch_is_attended_to_as_by_the_book(dtype: str, data: st.DataObject) -> None:
    num_kv_heads, heads_each, key_dim, value_dim = data.draw(st.sampled_from(SHAPES))
    batch = gpu_batch(
        np.random.default_rng(data.draw(st.integers(0, 1000))),
        data.draw(sequences(lengths=LENGTHS, most_new=(1, 1, 16, 90), most=4)),
        block_size=data.draw(st.sampled_from([8, 16, 16, 32, 64, 256, 1, 7])),
        shape=LayerShape(num_kv_heads, key_dim, value_dim),
        heads_each=heads_each,
        dtype=dtype,
        loudness=data.draw(st.sampled_from([0.1, 1.0, 2.0])),
    )
    some = data.draw(options(num_kv_heads * heads_each, key_dim=key_dim, farthest=100))
    assert relative_error(batch.attend(**some), batch.expected(**some)) < TOLERANCE[dtype]


@settings(max_examples=15)
@given(data=st.data())
def test_any_long_contexts_are_cut_and_put_together(data: st.DataObject) -> None:
    num_kv_heads, heads_each, key_dim, value_dim = data.draw(st.sampled_from(SHAPES[:4]))
    batch = gpu_batch(
        np.random.default_rng(data.draw(st.integers(0, 1000))),
        data.draw(sequences(lengths=st.integers(400, 900), most_new=(1, 1, 9), most=2)),
        block_size=data.draw(st.sampled_from([8, 16, 7])),
        shape=LayerShape(num_kv_heads, key_dim, value_dim),
        heads_each=heads_each,
        dtype="float32",
    )
    some = data.draw(options(num_kv_heads * heads_each, farthest=900))
    assert relative_error(batch.attend(**some), batch.expected(**some)) < TOLERANCE["float32"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_float32_queries_over_half_precision_lose_nothing(dtype: str) -> None:
    batch = gpu_batch(np.random.default_rng(0), [(90, 1), (50, 40)], heads_each=2, dtype=dtype)
    for some in ({}, {"window": 20, "sinks": np.arange(4.0)}):
        result = batch.attend(q_dtype="float32", **some)
        assert relative_error(result, batch.expected(q_dtype="float32", **some)) < 1e-5


def test_a_long_context_among_short_ones_is_cut_and_put_together() -> None:
    batch = gpu_batch(
        np.random.default_rng(1), [(1300, 1), *[(10, 1)] * 6], heads_each=2, dtype="bfloat16"
    )
    plan = batch.storage.plan(batch.host.block_tables, batch.host.lengths, batch.host.query_starts)
    for some in ({}, {"sinks": np.linspace(-3, 6, 4)}, {"window": 1100, "soft_cap": 20.0}):
        out = batch.storage.attend_planned(1, batch.q(), plan, **some)
        assert relative_error(out.float().cpu().numpy(), batch.expected(**some)) < 1e-2
    for kind in plan._cuts:
        assert len(plan.cut(kind).launches[0].entries)


def test_more_parts_than_are_put_together_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_module, "_COMBINED_PARTS", 2)
    batch = gpu_batch(np.random.default_rng(3), [(900, 1)], shape=LayerShape(1, 16, 16))
    assert relative_error(batch.attend(), batch.expected()) < TOLERANCE["float32"]


def test_a_chunk_over_a_long_context_is_cut_too() -> None:
    batch = gpu_batch(
        np.random.default_rng(2), [(700, 8)], heads_each=4, shape=LayerShape(1, 16, 16)
    )
    some = {"sinks": np.linspace(-3, 6, 4)}
    assert relative_error(batch.attend(**some), batch.expected(**some)) < TOLERANCE["float32"]
    plan = batch.storage.plan(batch.host.block_tables, batch.host.lengths, [0, 8])
    (launch,) = plan.cut(*plan._cuts).launches
    assert launch.tile.rows == 32 and (len(launch.entries) or DEVICE != "cpu")


@pytest.mark.parametrize("new", [1, 30])
@pytest.mark.parametrize("garbage", [np.nan, np.inf])
def test_what_lies_in_slots_of_nobody_changes_no_bit(garbage: float, new: int) -> None:
    batch = gpu_batch(np.random.default_rng(1), [(37, new), (50, new)], block_size=8)
    before = batch.attend(window=20)
    host = batch.host
    used = [slots_of(host.block_tables[i], 0, int(n), 8) for i, n in enumerate(host.lengths)]
    free = np.setdiff1d(np.arange(host.storage.num_blocks * 8), np.concatenate(used))
    # The first tokens are out of the window of every query: their blocks may be others' by now.
    gone = used[0][: max(0, 37 - new - 20 + 1)]
    for slots in (free, gone):
        rows = np.full((len(slots), 2, 16), garbage, dtype=np.float32)
        host.storage.write(1, rows, rows, slots)
    put(host.storage.data, batch.storage)
    assert np.array_equal(batch.attend(window=20), before)


def test_a_table_may_hold_anything_before_the_window() -> None:
    batch = gpu_batch(np.random.default_rng(1), [(37, 1)], block_size=4)
    before = batch.attend(window=5)
    batch.host.block_tables[0, :8] = -1
    assert np.array_equal(batch.attend(window=5), before)


def test_a_cap_far_above_the_scores_costs_no_digits() -> None:
    batch = gpu_batch(np.random.default_rng(6), [(40, 1), (40, 30)])
    assert relative_error(batch.attend(soft_cap=1e4), batch.expected()) < 1e-5


def test_a_scale_may_be_below_zero() -> None:
    batch = gpu_batch(np.random.default_rng(6), [(40, 1), (90, 70)])
    for scale in (-0.3, 0.0):
        assert relative_error(batch.attend(scale=scale), batch.expected(scale=scale)) < 1e-5


def test_weights_too_small_for_a_float_are_nothing() -> None:
    batch = gpu_batch(np.random.default_rng(6), [(40, 1), (120, 90)], loudness=60.0)
    # Scores of some hundreds are themselves only exact to some 1e-5.
    assert relative_error(batch.attend(), batch.expected()) < 2e-4


def test_a_sink_of_minus_infinity_is_none() -> None:
    batch = gpu_batch(np.random.default_rng(6), [(40, 1), (1200, 1), (9, 9)])
    assert np.allclose(batch.attend(sinks=np.full(2, -np.inf)), batch.attend(), atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_sinks_on_the_device_are_read_where_they_lie_in_any_dtype(dtype: torch.dtype) -> None:
    batch = gpu_batch(np.random.default_rng(6), [(40, 1), (1200, 1), (9, 9)])
    sinks = torch.tensor([[0.3, 9.0], [-2.1, 9.0]], device=DEVICE, dtype=dtype)[:, 0]
    assert np.array_equal(batch.attend(sinks=sinks), batch.attend(sinks=sinks.float()))


def test_an_output_given_is_written_and_returned() -> None:
    batch = gpu_batch(np.random.default_rng(6), [(20, 3)])
    room = torch.full((3, 5, 24), 7.0, device=DEVICE)
    out = room[:, 1:3, 4:20]
    host = batch.host
    arguments = (1, batch.q(), host.block_tables, host.lengths, host.query_starts)
    assert batch.storage.attend(*arguments, out=out) is out
    assert np.array_equal(out.cpu().numpy(), batch.attend())
    room[:, 1:3, 4:20] = 7
    assert bool((room == 7).all())


@pytest.mark.parametrize("new", [1, 20])
def test_queries_are_read_where_they_lie(new: int) -> None:
    batch = gpu_batch(np.random.default_rng(7), [(40, new), (30, new)], heads_each=2)
    expected = batch.attend()
    q = batch.q()
    fused = torch.full((2 * new, 6, 40), float("nan"), device=DEVICE)
    fused[:, 1:5, 8:24] = q
    heads_first = q.transpose(0, 1).contiguous().transpose(0, 1)
    last_first = q.transpose(1, 2).contiguous().transpose(1, 2)
    host = batch.host
    for given_q in (fused[:, 1:5, 8:24], heads_first, last_first):
        out = batch.storage.attend(1, given_q, host.block_tables, host.lengths, host.query_starts)
        assert np.array_equal(out.cpu().numpy(), expected)


def test_a_batch_planned_once_serves_layers_of_every_kind() -> None:
    rng = np.random.default_rng(8)
    layers = [LayerShape(2, 16, 16)] * 2 + [LayerShape(1, 16, 16)]
    host = KVStorage(10, 16, layers)
    table = rng.permutation(10).astype(np.int32)[None]
    written = []
    for layer, heads in ((0, 2), (1, 2), (2, 1)):
        k, v = rng.standard_normal((2, 150, heads, 16), dtype=np.float32)
        host.write(layer, k, v, slots_of(table[0], 0, 150, 16))
        written.append((k, v))
    storage = GPUStorage(10, 16, layers, dtype="float32", device=DEVICE)
    put(host.data, storage)
    q = rng.standard_normal((2, 2, 16), dtype=np.float32)
    plan = storage.plan(table, [150], [0, 2])
    many: list[dict[str, Any]] = [{}, {"sinks": np.ones(2)}, {"window": 100}, {"soft_cap": 2.0}]
    for some in many:
        for layer in (0, 1, 2, 0):
            found = storage.attend_planned(layer, torch.from_numpy(q).to(DEVICE), plan, **some)
            expected = reference_attend(q, *written[layer], **some)
            assert relative_error(found.cpu().numpy(), expected) < 1e-5


def test_batches_in_which_nobody_asks() -> None:
    batch = gpu_batch(np.random.default_rng(8), [(20, 0), (3, 0)])
    assert batch.attend().shape == (0, 2, 16)
    nobody = batch.storage.attend(
        1, batch.q(), np.empty((0, 3), np.int32), np.empty(0, np.int64), np.zeros(1, np.int64)
    )
    assert nobody.shape == (0, 2, 16)


def test_places_beyond_2_to_the_31_numbers() -> None:
    shape = LayerShape(4, 64, 64)
    block_size = 256
    num_blocks = 2**31 // (block_size * 512) + 3
    storage = GPUStorage(num_blocks, block_size, [shape], dtype="bfloat16", device=DEVICE)
    assert storage.data.numel() > 2**31
    rng = np.random.default_rng(9)
    k, v = (torch.from_numpy(rows).to(DEVICE) for rows in rng.standard_normal((2, 260, 4, 64)))
    k, v = k.bfloat16(), v.bfloat16()
    table = np.array([num_blocks - 1, num_blocks - 3], dtype=np.int32)
    rows = slice(240, 260)  # over the border between the two
    storage.data[num_blocks - 1] = 0
    storage.write(0, k[rows], v[rows], slots_of(table, 240, 260, block_size))
    storage.copy_blocks([[num_blocks - 3, num_blocks - 2]])
    q = torch.from_numpy(rng.standard_normal((1, 4, 64))).to(DEVICE).bfloat16()
    expected = reference_attend(
        *(part.float().cpu().numpy() for part in (q, k[rows], v[rows])), window=20
    )
    for last in (num_blocks - 3, num_blocks - 2):
        table[1] = last
        out = storage.attend(0, q, table[None], [260], [0, 1], window=20)
        assert relative_error(out.float().cpu().numpy(), expected) < TOLERANCE["bfloat16"]


def test_heads_that_lie_more_than_2_to_the_31_numbers_apart() -> None:
    apart, tokens, dim = 2**30 + 8, 6, 16
    room = torch.empty(2 * apart + tokens * dim, dtype=torch.float16, device=DEVICE)
    rng = np.random.default_rng(9)
    far = room.as_strided((tokens, 3, dim), (dim, apart, 1))
    rows = torch.from_numpy(rng.standard_normal((tokens, 3, dim))).to(DEVICE).half()
    far.copy_(rows)
    storage = GPUStorage(2, 8, [LayerShape(3, dim, dim)], dtype="float16", device=DEVICE)
    table = np.array([[1]], dtype=np.int32)
    storage.write(0, far, far, slots_of(table[0], 0, tokens, 8))
    for part in storage.read(0, table[0], tokens):
        assert torch.equal(part, rows.float())
    out = storage.attend(0, far, table, [tokens], [0, tokens])
    expected = reference_attend(*[rows.double().cpu().numpy()] * 3)
    assert relative_error(out.float().cpu().numpy(), expected) < TOLERANCE["float16"]


class TestBadInput:
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"lengths": np.array([2])}, r"lengths\[0\] is below the number of its queries"),
            ({"lengths": np.array([99])}, r"block_tables\[0\] has fewer than"),
            ({"lengths": np.array([20.0])}, "lengths must be integers"),
            ({"block_tables": np.array([[1, 9]], np.int32)}, "a block outside 0 to 3"),
            ({"block_tables": np.array([[-1, 1]], np.int32)}, "a block outside 0 to 3"),
            ({"block_tables": np.ones((2, 2), np.int32)}, "a row for each of 1 lengths"),
            ({"block_tables": np.array([[1, 2**32]])}, "a block outside 0 to 3"),
            ({"query_starts": np.array([0, 2])}, "q has 3 tokens, but query_starts ends with 2"),
            ({"query_starts": np.array([1, 3])}, "query_starts must begin with 0"),
            ({"query_starts": np.array([0, 4, 3])}, "query_starts must begin with 0"),
        ],
    )
    def test_of_a_batch(self, change: dict[str, Any], message: str) -> None:
        batch = gpu_batch(np.random.default_rng(0), [(20, 3)])
        for name, value in change.items():
            setattr(batch.host, name, value)
        with pytest.raises(ValueError, match=message) as caught:
            batch.attend()
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize(
        ("shape", "dtype", "message"),
        [
            ((3, 3, 16), "float32", "3 heads do not share 2 KV heads"),
            ((3, 2, 8), "float32", r"q has shape \[3, 2, 8\]"),
            ((3, 2, 16), "float64", "q is float64: give float32"),
            ((2, 2, 16), "float32", "q has 2 tokens, but query_starts ends with 3"),
        ],
    )
    def test_of_queries(self, shape: tuple[int, ...], dtype: str, message: str) -> None:
        batch = gpu_batch(np.random.default_rng(0), [(20, 3)])
        q = torch.ones(shape, dtype=getattr(torch, dtype), device=DEVICE)
        host = batch.host
        with pytest.raises(ValueError, match=message):
            batch.storage.attend(1, q, host.block_tables, host.lengths, host.query_starts)

    @pytest.mark.parametrize(
        ("some", "message"),
        [
            ({"window": 0}, "window must be at least 1"),
            ({"chunk": -3}, "chunk must be at least 1"),
            ({"window": 1.5}, "window is 1.5: give an integer"),
            ({"scale": np.nan}, "scale is nan: give a number"),
            ({"sinks": np.array([0.0, np.inf])}, "sinks hold inf or a NaN"),
            ({"soft_cap": 0.0}, "soft_cap must be above 0"),
            ({"sinks": np.ones(3)}, r"sinks has shape \[3\], not \[2\]"),
            ({"out": torch.ones(3, 2, 8)}, "out must be float32"),
            ({"out": torch.ones(3, 2, 16).half()}, "out must be float32"),
            ({"out": torch.ones(3, 2, 32)[:, :, ::2]}, "contiguous last axis"),
        ],
    )
    def test_of_options(self, some: dict[str, Any], message: str) -> None:
        batch = gpu_batch(np.random.default_rng(0), [(20, 3)])
        with pytest.raises(ValueError, match=message):
            batch.attend(**some)

    def test_of_a_layer(self) -> None:
        batch = gpu_batch(np.random.default_rng(0), [(20, 3)])
        batch.host.layer = 3
        with pytest.raises(ValueError, match="no layer 3: this storage has 3"):
            batch.attend()

    def test_of_a_plan(self) -> None:
        """Even after its own storage has used it, which prepares what layers alike launch."""
        batch, other = (gpu_batch(np.random.default_rng(0), [(20, 3)]) for _ in range(2))
        host = batch.host
        plan = batch.storage.plan(host.block_tables, host.lengths, host.query_starts)
        decodes = batch.storage.decode_plan(1, 2)
        batch.storage.attend_planned(1, batch.q(), plan)
        for given_plan in (plan, decodes):
            with pytest.raises(ValueError, match="plan is made by another storage"):
                other.storage.attend_planned(1, batch.q(), given_plan)
        with pytest.raises(ValueError, match="plan is NoneType: give what `plan`"):
            batch.storage.attend_planned(1, batch.q(), None)
