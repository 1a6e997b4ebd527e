from __future__ import annotations

import subprocess
import sys
import types
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.attention_model import fill_with_nan, paged_batch, rounded
from pagedkv.attention import KVStorage, LayerShape
from pagedkv.attention.threads import num_cpus
from pagedkv.errors import InvalidInput

LAYERS = [LayerShape(2, 16, 8), LayerShape(1, 8, 24)]
DTYPES = ["float32", "bfloat16", "float16"]


def storage_of(num_blocks: int = 4, block_size: int = 4, dtype: str = "float32") -> KVStorage:
    storage = KVStorage(num_blocks, block_size, LAYERS, dtype=dtype)
    fill_with_nan(storage)
    return storage


def rows(rng: np.random.Generator, num_tokens: int, layer: int) -> tuple[Any, Any]:
    shape = LAYERS[layer]
    return (
        rng.standard_normal((num_tokens, shape.num_kv_heads, shape.key_dim), dtype=np.float32),
        rng.standard_normal((num_tokens, shape.num_kv_heads, shape.value_dim), dtype=np.float32),
    )


def test_a_page_holds_all_layers_and_its_size_is_told() -> None:
    storage = KVStorage(10, 16, LAYERS, dtype="bfloat16")
    assert storage.bytes_per_token == (2 * (16 + 8) + (8 + 24)) * 2
    assert storage.page_bytes == 16 * storage.bytes_per_token
    assert storage.nbytes == 10 * storage.page_bytes == storage.data.nbytes
    assert storage.data.shape == (10, storage.page_bytes // 2)


def test_keys_of_one_head_and_block_are_one_run_and_values_follow() -> None:
    storage = storage_of()
    k, v = rows(np.random.default_rng(0), 4, 1)
    storage.write(1, k, v, np.arange(8, 12))
    page = storage.data[2]
    start = 4 * 2 * (16 + 8)
    assert np.array_equal(page[start : start + 32], k.reshape(-1))
    assert np.array_equal(page[start + 32 :], v.reshape(-1))
    assert np.isnan(page[:start]).all()


@pytest.mark.parametrize("dtype", DTYPES)
@given(data=st.data())
def test_what_is_written_is_read_back_and_nothing_else_changes(
    dtype: str, data: st.DataObject
) -> None:
    num_blocks, block_size = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 9))
    storage = storage_of(num_blocks, block_size, dtype)
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    everything = [
        np.full(a.shape, np.nan) for i in (0, 1) for a in rows(rng, storage_slots(storage), i)
    ]
    for _ in range(data.draw(st.integers(1, 4))):
        layer = data.draw(st.sampled_from([0, 1]))
        slots = np.array(
            data.draw(st.lists(st.integers(-1, storage_slots(storage) - 1), max_size=12)),
            dtype=np.int64,
        )
        k, v = rows(rng, len(slots), layer)
        storage.write(layer, k, v, slots)
        for token, slot in enumerate(slots):
            if slot >= 0:
                everything[2 * layer][slot] = (
                    rounded(k[token], dtype) if dtype != "float32" else k[token]
                )
                everything[2 * layer + 1][slot] = (
                    rounded(v[token], dtype) if dtype != "float32" else v[token]
                )
    table = np.arange(num_blocks)
    for layer in (0, 1):
        for found, expected in zip(
            storage.read(layer, table, storage_slots(storage)), everything[2 * layer :]
        ):
            assert np.array_equal(found, expected, equal_nan=True)


def storage_slots(storage: KVStorage) -> int:
    return storage.num_blocks * storage.block_size


def test_padding_writes_nowhere_and_not_into_the_last_slot() -> None:
    storage = storage_of()
    before = storage.data.copy()
    k, v = rows(np.random.default_rng(0), 5, 0)
    storage.write(0, k, v, np.full(5, -1))
    assert np.array_equal(storage.data, before, equal_nan=True)


@pytest.mark.parametrize("bad", [-2, 16, 2**40])
def test_a_slot_out_of_range_is_named_and_nothing_is_written(bad: int) -> None:
    storage = storage_of()
    before = storage.data.copy()
    k, v = rows(np.random.default_rng(0), 3, 0)
    with pytest.raises(ValueError, match=rf"slots\[2\] is {bad}: .* slots 0 to 15"):
        storage.write(0, k, v, np.array([0, 1, bad]))
    assert np.array_equal(storage.data, before, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_that_are_hard_to_round(dtype: str) -> None:
    storage = storage_of(dtype=dtype)
    hard = np.array(
        [0.0, -0.0, np.inf, -np.inf, np.nan, 1 + 2**-8, 1 + 3 * 2**-8, 65504, 1e-7, 6e-8, 3e38,
         1 + 2**-11, 1 + 3 * 2**-11, 2**-14, -1.5, np.float32(2**-126)],
        dtype=np.float32,
    )  # fmt: skip
    with np.errstate(over="ignore"):
        expected = hard if dtype == "float32" else rounded(hard, dtype)
    storage.write(0, np.tile(hard, (1, 2, 1)), np.tile(hard[:8], (1, 2, 1)), np.array([5]))
    k, v = storage.read(0, np.array([1]), 2)
    for found, wanted in ((k[1], expected), (v[1], expected[:8])):
        assert np.array_equal(found, np.tile(wanted, (2, 1)), equal_nan=True)
        assert np.array_equal(np.signbit(found[:, :4]), np.tile(np.signbit(hard[:4]), (2, 1)))


def test_a_nan_whose_bits_would_round_to_another_number_stays_one() -> None:
    storage = storage_of(dtype="bfloat16")
    bits = np.array([0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001] + [0] * 5, dtype=np.uint32)
    k = np.resize(bits, (1, 2, 16)).view(np.float32)
    storage.write(0, k, k[:, :, :8], np.array([0]))
    assert np.isnan(storage.read(0, np.array([0]), 1)[0][0, 0, :3]).all()


def test_numbers_in_the_dtype_of_the_storage_are_kept_to_the_bit() -> None:
    half = storage_of(dtype="float16")
    k, v = (a.astype(np.float16) for a in rows(np.random.default_rng(0), 3, 0))
    half.write(0, k, v, np.arange(3))
    assert np.array_equal(half.read(0, np.array([0]), 3)[0], k.astype(np.float32))


def test_keys_are_read_where_they_lie() -> None:
    k, v = rows(np.random.default_rng(0), 6, 0)
    plain = storage_of()
    plain.write(0, k, v, np.arange(6))
    fused = np.full((6, 4, 30), np.nan, dtype=np.float32)
    fused[:, 1:3, 3:19] = k
    others = [
        fused[:, 1:3, 3:19],
        np.ascontiguousarray(k.transpose(1, 0, 2)).transpose(1, 0, 2),
        np.asfortranarray(k),
        np.repeat(k, 2, axis=2)[:, :, ::2],
    ]
    for keys in others:
        storage = storage_of()
        storage.write(0, keys, v, np.arange(6))
        assert np.array_equal(storage.data, plain.data, equal_nan=True)


def test_copies_are_made_in_order_and_of_whole_pages() -> None:
    storage = storage_of()
    storage.data[:] = np.arange(4, dtype=np.float32)[:, None]
    storage.copy_blocks(np.array([[0, 1], [1, 2]], dtype=np.int32))
    assert storage.data.tolist() == [[0.0] * storage.data.shape[1]] * 3 + [
        [3.0] * storage.data.shape[1]
    ]
    storage.copy_blocks(np.empty((0, 2), dtype=np.int32))


@pytest.mark.parametrize("bad", [[0, 4], [-1, 0]])
def test_a_copy_out_of_range_is_refused_and_nothing_is_copied(bad: list[int]) -> None:
    storage = storage_of()
    storage.data[:] = np.arange(4, dtype=np.float32)[:, None]
    with pytest.raises(ValueError, match="blocks outside 0 to 3"):
        storage.copy_blocks(np.array([[0, 1], bad], dtype=np.int32))
    assert (storage.data == np.arange(4)[:, None]).all()


@pytest.mark.parametrize(
    ("given_", "message"),
    [
        ({"k": np.ones((2, 2, 8), np.float32)}, r"k has shape \[2, 2, 8\], not \[tokens, 2, 16\]"),
        ({"v": np.ones((2, 16), np.float32)}, r"v has shape \[2, 16\]"),
        ({"k": np.ones((2, 2, 16))}, "k is float64: give float32$"),
        ({"k": np.ones((2, 2, 16), ">f4")}, "k is >f4: give float32$"),
        ({"k": np.ones((3, 2, 16), np.float32)}, "3 keys, 2 values and 2 slots"),
        ({"slots": np.zeros(1, np.int64)}, "2 keys, 2 values and 1 slots"),
        ({"slots": np.zeros(2)}, "slots must be integers, not float64"),
        ({"slots": np.zeros((2, 1), np.int64)}, r"slots has shape \[2, 1\]"),
        ({"slots": np.array([0, 2**63], np.uint64)}, "slots go up to 9223372036854775808"),
        ({"layer": 0.0}, "layer is 0.0: give an integer"),
        ({"layer": 2}, "no layer 2"),
    ],
)
def test_bad_input_of_write_is_one_clear_line(given_: dict[str, Any], message: str) -> None:
    k, v = rows(np.random.default_rng(0), 2, 0)
    call = {"layer": 0, "k": k, "v": v, "slots": np.zeros(2, np.int64)} | given_
    with pytest.raises(ValueError, match=message):
        storage_of().write(**call)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LayerShape(0, 8, 8), "at least 1 KV head"),
        (lambda: LayerShape(1, 12, 8), "key_dim must be a multiple of 8, not 12"),
        (lambda: LayerShape(1, 8, 0), "value_dim must be a multiple of 8, not 0"),
        (lambda: KVStorage(0, 16, LAYERS), "0 blocks of 16 tokens hold nothing"),
        (lambda: KVStorage(4, 16, []), "without layers"),
        (lambda: KVStorage(4, 16, LAYERS, dtype="float64"), "unknown dtype 'float64': choose"),
        (lambda: KVStorage(2**55, 1, LAYERS), "does not promise"),
        (lambda: LayerShape(2.0, 16, 16), "num_kv_heads is 2.0: give an integer"),
        (lambda: LayerShape(1, "8", 8), "key_dim is '8': give an integer"),
        (lambda: LayerShape(1, 8, True), "value_dim is True: give an integer"),
        (lambda: KVStorage(4.0, 16, LAYERS), "num_blocks is 4.0: give an integer"),
        (lambda: KVStorage(True, 16, LAYERS), "num_blocks is True: give an integer"),
        (lambda: KVStorage(4, "16", LAYERS), "block_size is '16': give an integer"),
        (lambda: KVStorage(4, 16, LAYERS, num_threads=1.5), "num_threads is 1.5: give an int"),
        (lambda: KVStorage(4, 16, LAYERS, num_threads="x"), "num_threads is 'x': give an int"),
        (lambda: KVStorage(4, 16, LAYERS, num_threads=0), "num_threads must be at least 1"),
        (lambda: KVStorage(4, 16, LAYERS[0]), "layers is LayerShape.*: give a list"),
        (lambda: KVStorage(4, 16, [(2, 16, 16)]), r"layers\[0\] is \(2, 16, 16\): give a Layer"),
        (lambda: KVStorage(4, 16, LAYERS, dtype=np.float64), "unknown dtype .*float64"),
        (lambda: KVStorage(4, 16, LAYERS, dtype=None), "unknown dtype None"),
    ],
)
def test_bad_storages_are_refused_in_one_line(make: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("dtype", [np.float16, np.dtype("float16"), "float16"])
def test_a_dtype_may_be_the_thing_or_its_name(dtype: Any) -> None:
    storage = KVStorage(2, 4, LAYERS, dtype=dtype)
    assert (storage.dtype, storage.data.dtype) == ("float16", np.float16)


def test_a_dtype_of_torch_is_one_too() -> None:
    torch = pytest.importorskip("torch", reason="needs the extra [engine]")
    for name in DTYPES:
        assert KVStorage(2, 4, LAYERS, dtype=getattr(torch, name)).dtype == name


def test_sizes_may_be_integers_of_numpy() -> None:
    two = np.int64(2)
    shape = LayerShape(two, np.uint8(16), np.int32(8))
    assert shape == LayerShape(2, 16, 8)
    assert {type(n) for n in (shape.num_kv_heads, shape.key_dim, shape.value_dim)} == {int}
    storage = KVStorage(two, two, [shape], num_threads=two)
    k, v = rows(np.random.default_rng(0), 1, 0)
    storage.write(np.int32(0), k, v, np.array([3], ">i4"))
    assert np.array_equal(storage.read(np.uint8(0), [0, 1], np.int16(4))[0][3:], k)


def test_a_system_that_does_not_tell_whose_cpus_has_all_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr("os.sched_getaffinity", raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: 3)
    assert num_cpus() == 3
    assert KVStorage(2, 4, LAYERS).dtype == "float32"
    monkeypatch.setattr("os.cpu_count", lambda: None)
    assert num_cpus() == 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: s.read(0, [0], 5), "length must be 0 to 4, .* of 1 entries holds, not 5"),
        (lambda s: s.read(0, [0], -1), "length must be 0 to 4"),
        (lambda s: s.read(0, [0], 1.0), "length is 1.0: give an integer"),
        (lambda s: s.read(0, [4], 1), "block_table names blocks outside 0 to 3"),
        (lambda s: s.read(0, [[0]], 1), r"block_table has shape \[1, 1\]"),
        (lambda s: s.copy_blocks([[0, 1, 2]]), r"copies \[1, 3\] must be \[n, 2\]"),
        (lambda s: s.copy_blocks([0, 1]), r"copies has shape \[2\]"),
    ],
)
def test_what_cannot_be_read_or_copied_is_refused_in_one_line(call: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=message) as caught:
        call(storage_of())
    assert "\n" not in str(caught.value)


class FakeTensor:
    """As much of a torch tensor as is used, so that tests need no torch."""

    def __init__(self, array: np.ndarray, dtype: str) -> None:
        self.array, self.dtype = array, f"torch.{dtype}"

    def detach(self) -> FakeTensor:
        return self

    def view(self, dtype: object) -> FakeTensor:
        return FakeTensor(self.array.view(dtype), "int16")

    def numpy(self) -> np.ndarray:
        if self.dtype == "torch.bfloat16":
            raise TypeError("Got unsupported ScalarType BFloat16")
        return self.array

    def new_empty(self, shape: tuple[int, ...]) -> FakeTensor:
        return FakeTensor(np.empty(shape, self.array.dtype), self.dtype.partition(".")[2])

    def __len__(self) -> int:
        return len(self.array)


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_pass_without_a_copy(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("faketorch")
    module.int16 = np.int16  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "faketorch", module)
    monkeypatch.setattr(FakeTensor, "__module__", "faketorch")
    batch = paged_batch(np.random.default_rng(0), [(20, 3)], heads_each=2, dtype=dtype)
    expected = batch.attend()
    if dtype != "float32":
        expected = rounded(expected, dtype)
    q = batch.q if dtype == "float32" else rounded(batch.q, dtype)
    bits = {
        "float32": q,
        "float16": q.astype(np.float16),
        "bfloat16": (q.view(np.uint32) >> 16).astype(np.uint16),
    }[dtype]
    batch.q = FakeTensor(bits, dtype)  # type: ignore[assignment]
    out = batch.attend()
    assert isinstance(out, FakeTensor)
    found = out.array.astype(np.float32)
    if dtype == "bfloat16":
        found = (out.array.astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_allclose(found, expected, atol=2e-2 if dtype != "float32" else 0)
    room = FakeTensor(np.zeros_like(out.array), dtype)
    assert batch.attend(out=room) is room
    assert np.array_equal(room.array, out.array)


@pytest.mark.parametrize("dtype", DTYPES)
def test_real_tensors_pass_without_a_copy(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    batch = paged_batch(np.random.default_rng(0), [(20, 3)], heads_each=2, dtype=dtype)
    expected = batch.attend()
    q = torch.from_numpy(batch.q).to(getattr(torch, dtype)).requires_grad_()
    tables, lengths = torch.from_numpy(batch.block_tables), torch.from_numpy(batch.lengths)
    starts = torch.from_numpy(batch.query_starts)
    out = batch.storage.attend(1, q, tables, lengths, starts)
    assert out.dtype == q.dtype
    np.testing.assert_allclose(out.float().numpy(), expected, atol=3e-2)
    room = torch.empty_like(out)
    assert batch.storage.attend(1, q, tables, lengths, starts, out=room) is room
    assert torch.equal(room, out)
    with pytest.raises(ValueError, match="q cannot be read where it lies"):
        batch.storage.attend(1, q.to("meta"), tables, lengths, starts)


def test_attention_never_imports_torch() -> None:
    code = "import sys, pagedkv.attention; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
