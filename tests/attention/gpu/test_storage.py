from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch", reason="needs the extra [engine]")
pytest.importorskip("triton", reason="needs triton")

import torch

from models.gpu_batch import DEVICE, put
from pagedkv.attention import KVStorage, LayerShape, reference_attend
from pagedkv.attention.gpu import GPUStorage
from pagedkv.attention.gpu.copying import at_once

LAYERS = [LayerShape(1, 8, 24), LayerShape(3, 16, 40), LayerShape(2, 80, 8)]


def storages(
    dtype: str = "float32", num_blocks: int = 5, block_size: int = 4
) -> tuple[KVStorage, GPUStorage]:
    """One on the host and one on the device, both full of the same nonsense."""
    host = KVStorage(num_blocks, block_size, LAYERS, dtype=dtype)
    rng = np.random.default_rng(0)
    host.data[:] = rng.integers(0, 1000, host.data.shape)
    storage = GPUStorage(num_blocks, block_size, LAYERS, dtype=dtype, device=DEVICE)
    put(host.data, storage)
    return host, storage


def pages_of(storage: GPUStorage) -> bytes:
    return storage.data.cpu().view(torch.uint8).numpy().tobytes()


def rows(rng: np.random.Generator, layer: int, num_tokens: int) -> tuple[Any, Any]:
    shape = LAYERS[layer]
    sizes = (shape.key_dim, shape.value_dim)
    k, v = (
        rng.standard_normal((num_tokens, shape.num_kv_heads, dim), dtype=np.float32)
        for dim in sizes
    )
    return k, v


def test_attention_on_the_host_loads_neither_torch_nor_triton() -> None:
    code = "import sys, pagedkv.attention; print({'torch', 'triton'} & set(sys.modules))"
    source = Path(__file__).parents[3] / "src"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(source)},
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == "set()"


def test_its_sizes_are_those_of_a_storage_on_the_host() -> None:
    for dtype in ("float32", "bfloat16"):
        host, storage = storages(dtype)
        for name in ("page_bytes", "bytes_per_token", "nbytes", "num_blocks", "layers", "dtype"):
            assert getattr(host, name) == getattr(storage, name)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@settings(max_examples=15)
@given(data=st.data())
def test_what_is_written_lies_where_the_host_would_have_put_it(
    dtype: str, data: st.DataObject
) -> None:
    host, storage = storages(dtype)
    layer = data.draw(st.integers(0, 2))
    slots = np.array(data.draw(st.lists(st.integers(0, 19), unique=True, max_size=6)), np.int64)
    slots[data.draw(st.integers(0, 6)) :: 3] = -1
    k, v = rows(np.random.default_rng(data.draw(st.integers(0, 100))), layer, len(slots))
    given_k, given_v = (torch.from_numpy(part).to(DEVICE) for part in (k, v))
    if data.draw(st.booleans()):
        given_k, given_v = (part.to(storage.data.dtype) for part in (given_k, given_v))
    host.write(layer, k, v, slots)
    there = torch.from_numpy(slots).to(DEVICE) if data.draw(st.booleans()) else slots
    storage.write(layer, given_k, given_v, there)
    assert pages_of(storage) == host.data.tobytes()


def test_float32_is_rounded_to_nearest_where_the_storage_is_narrower() -> None:
    for dtype in ("bfloat16", "float16"):
        host, storage = storages(dtype)
        k, v = rows(np.random.default_rng(1), 1, 20)
        k[0] = 1 + 2.0**-8  # half way between two numbers of bfloat16, the lower of them even
        k[1] = 1 + 3 * 2.0**-8
        host.write(1, k, v, np.arange(20))
        storage.write(1, *(torch.from_numpy(part).to(DEVICE) for part in (k, v)), np.arange(20))
        assert pages_of(storage) == host.data.tobytes()


def test_rows_are_read_where_they_lie() -> None:
    host, storage = storages()
    k, v = rows(np.random.default_rng(2), 1, 4)
    slots = np.array([3, 0, 19, 7])
    host.write(1, k, v, slots)
    fused = torch.full((4, 5, 70), torch.nan, device=DEVICE)
    fused[:, 1:4, 2:18] = torch.from_numpy(k)
    fused[:, 1:4, 20:60] = torch.from_numpy(v)
    storage.write(1, fused[:, 1:4, 2:18], fused[:, 1:4, 20:60], slots)
    assert pages_of(storage) == host.data.tobytes()
    heads_first = [
        torch.from_numpy(part).to(DEVICE).transpose(0, 1).contiguous().transpose(0, 1)
        for part in (k, v)
    ]
    last_first = [part.transpose(1, 2).contiguous().transpose(1, 2) for part in heads_first]
    for given_rows in (heads_first, last_first):
        storage.data.zero_()
        storage.write(1, *given_rows, slots)
        for part, expected in zip(storage.read(1, [0, 1, 2, 3, 4], 20), (k, v)):
            assert np.array_equal(part[slots].cpu().numpy(), expected)


def test_slots_on_the_device_that_do_not_exist_are_skipped() -> None:
    _, storage = storages()
    before = pages_of(storage)
    k, v = (torch.from_numpy(part).to(DEVICE) for part in rows(np.random.default_rng(2), 1, 4))
    storage.write(1, k, v, torch.tensor([-1, -7, 20, 2**40], device=DEVICE))
    assert pages_of(storage) == before


def test_what_is_read_is_what_the_host_reads() -> None:
    for dtype in ("float32", "bfloat16"):
        host, storage = storages(dtype)
        for ours, theirs in zip(storage.read(2, [4, 0, 1], 9), host.read(2, [4, 0, 1], 9)):
            assert np.array_equal(ours.cpu().numpy(), theirs)


@settings(max_examples=15)
@given(pairs=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=7))
def test_copies_are_made_one_after_the_other(pairs: list[tuple[int, int]]) -> None:
    host, storage = storages("bfloat16")
    copies = np.array(pairs, dtype=np.int32).reshape(-1, 2)
    host.copy_blocks(copies)
    storage.copy_blocks(copies)
    assert pages_of(storage) == host.data.tobytes()


@given(pairs=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=9))
def test_copies_made_at_once_do_not_meet(pairs: list[tuple[int, int]]) -> None:
    runs = list(at_once([list(pair) for pair in pairs]))
    assert [tuple(pair) for run in runs for pair in run] == pairs
    for run in runs:
        targets = [target for source, target in run if source != target]
        assert len(set(targets)) == len(targets)
        assert not set(targets) & {source for source, _ in run}


def test_a_page_larger_than_a_program_copies_is_copied_whole() -> None:
    storage = GPUStorage(3, 64, [LayerShape(4, 64, 64)], dtype="float32", device=DEVICE)
    storage.data.copy_(torch.arange(storage.data.numel()).view_as(storage.data))
    expected = storage.data[2].clone()
    storage.copy_blocks([[2, 0]])
    assert torch.equal(storage.data[0], expected)
    assert not torch.equal(storage.data[1], expected)


class TestBadInput:
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"num_blocks": 0}, "0 blocks of 4 tokens hold nothing"),
            ({"layers": []}, "without layers"),
            ({"dtype": "int8"}, "unknown dtype 'int8'"),
            ({"dtype": torch.float64}, "unknown dtype torch.float64"),
            ({"block_size": 4.0}, "block_size is 4.0: give an integer"),
            ({"device": "meta"}, "no Triton kernels run on meta"),
            ({"layers": [LayerShape(1, 2048, 8)]}, "layer 0 has heads of more than 1024 numbers"),
        ],
    )
    def test_of_a_storage(self, change: dict[str, Any], message: str) -> None:
        given_arguments: dict[str, Any] = {
            "num_blocks": 5, "block_size": 4, "layers": LAYERS, "dtype": "float32",
            "device": DEVICE, **change,
        }  # fmt: skip
        with pytest.raises(ValueError, match=message):
            GPUStorage(**given_arguments)

    def test_more_memory_than_there_is(self) -> None:
        with pytest.raises(ValueError, match=r"has no room for 1000000000 blocks of \d+ bytes"):
            GPUStorage(10**9, 256, LAYERS * 10, device=DEVICE)

    @pytest.mark.parametrize(
        ("slots", "message"),
        [
            ([0, 20], r"slots\[1\] is 20: this storage has slots 0 to 19"),
            ([0, -2], r"slots\[1\] is -2"),
            ([0], "2 keys, 2 values and 1 slots"),
            ([0.0, 1.0], "slots must be integers"),
            (torch.tensor([0, 1], dtype=torch.int32), "slots must be int64"),
        ],
    )
    def test_of_slots(self, slots: Any, message: str) -> None:
        _, storage = storages()
        before = pages_of(storage)
        k, v = (torch.from_numpy(part).to(DEVICE) for part in rows(np.random.default_rng(2), 1, 2))
        with pytest.raises(ValueError, match=message):
            storage.write(1, k, v, slots)
        assert pages_of(storage) == before

    def test_of_rows(self) -> None:
        _, storage = storages("bfloat16")
        k, v = (torch.from_numpy(part).to(DEVICE) for part in rows(np.random.default_rng(2), 1, 2))
        for bad_k, message in (
            (k.half(), "k is float16: give bfloat16 or float32"),
            (k[:, :, :8], r"k has shape \[2, 3, 8\], not \[tokens, 3, 16\]"),
            (k.to("meta"), "k is on meta"),
        ):
            with pytest.raises(ValueError, match=message):
                storage.write(1, bad_k, v, [0, 1])

    def test_of_copies_and_tables(self) -> None:
        _, storage = storages()
        with pytest.raises(ValueError, match="copies name blocks outside 0 to 4"):
            storage.copy_blocks([[0, 5]])
        with pytest.raises(ValueError, match=r"copies \[1, 3\] must be \[n, 2\]"):
            storage.copy_blocks([[0, 1, 2]])
        with pytest.raises(ValueError, match="length must be 0 to 4"):
            storage.read(0, [0], 5)
        with pytest.raises(ValueError, match="block_table names blocks outside 0 to 4"):
            storage.read(0, [5], 1)


def test_what_layers_alike_have_in_common_is_made_once_for_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shape = LayerShape(2, 16, 16)
    layers = [shape, LayerShape(1, 16, 16), shape, shape]
    storage = GPUStorage(4, 4, layers, dtype="float32", device=DEVICE)
    rng = np.random.default_rng(0)
    made: list[Any] = []
    real = storage._attending

    def counted(*arguments: Any) -> Any:
        made.append(arguments)
        return real(*arguments)

    monkeypatch.setattr(storage, "_attending", counted)
    tables, lengths, starts = np.array([[2, 0]]), np.array([7]), np.array([0, 2])
    plan = storage.plan(tables, lengths, starts)
    slots = np.array([8, 9, 10, 11, 0, 1, 2])
    kept = []
    for layer, of in enumerate(layers):
        k, v = (
            torch.from_numpy(rng.standard_normal((7, of.num_kv_heads, 16), dtype=np.float32))
            for _ in range(2)
        )
        storage.write(layer, k.to(DEVICE), v.to(DEVICE), slots)
        kept.append((k.numpy(), v.numpy()))
    for layer, some, num_made in (
        (0, {}, 1), (1, {}, 2), (2, {}, 2), (3, {}, 2),
        (3, {"window": 3}, 3), (0, {"window": 3}, 3),
        (0, {"scale": -0.3}, 4), (2, {"scale": -0.3}, 4), (2, {"scale": 0.0}, 5),
        (2, {"soft_cap": 2.0}, 6), (0, {"sinks": np.ones(4)}, 7), (2, {"sinks": np.zeros(4)}, 7),
    ):  # fmt: skip
        q = torch.from_numpy(rng.standard_normal((2, 4, 16), dtype=np.float32)).to(DEVICE)
        out = storage.attend_planned(layer, q, plan, **some).cpu().numpy()
        expected = reference_attend(q.cpu().numpy(), *kept[layer], **some)
        assert np.abs(out - expected).max() < 1e-5
        assert len(made) == num_made, (layer, some)
