"""A storage that is obviously right: one dictionary from slot to keys and values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedkv.attention import KVStorage, LayerShape, reference_attend


@dataclass
class PagedBatch:
    """Sequences whose keys and values lie in a storage, and beside it in plain arrays."""

    storage: KVStorage
    layer: int
    block_tables: NDArray[np.int32]
    lengths: NDArray[np.int64]
    query_starts: NDArray[np.int64]
    q: NDArray[Any]
    k: list[NDArray[Any]] = field(default_factory=list)
    v: list[NDArray[Any]] = field(default_factory=list)

    def attend(self, **options: Any) -> NDArray[Any]:
        return self.storage.attend(
            self.layer, self.q, self.block_tables, self.lengths, self.query_starts, **options
        )

    def expected(self, **options: Any) -> NDArray[np.float64]:
        """By the reference, from the plain arrays."""
        parts = [
            reference_attend(self.q[start:stop], k, v, **options)
            for start, stop, k, v in zip(self.query_starts, self.query_starts[1:], self.k, self.v)
        ]
        return np.concatenate(parts)

    def alone(self, i: int) -> PagedBatch:
        """Sequence `i` in a batch of its own, with a table no wider than it needs."""
        width = -(-int(self.lengths[i]) // self.storage.block_size)
        start, stop = self.query_starts[i : i + 2]
        return PagedBatch(
            self.storage,
            self.layer,
            self.block_tables[i : i + 1, :width],
            self.lengths[i : i + 1],
            np.array([0, stop - start]),
            self.q[start:stop],
            [self.k[i]],
            [self.v[i]],
        )


def slots_of(
    block_table: NDArray[np.int32], start: int, stop: int, block_size: int
) -> NDArray[np.int64]:
    tokens = np.arange(start, stop)
    return block_table[tokens // block_size].astype(np.int64) * block_size + tokens % block_size


def fill_with_nan(storage: KVStorage) -> None:
    storage.data[:] = 0x7FC0 if storage.dtype == "bfloat16" else np.nan


def paged_batch(
    rng: np.random.Generator,
    sequences: list[tuple[int, int]],
    *,
    block_size: int = 16,
    shape: LayerShape | None = None,
    heads_each: int = 1,
    dtype: str = "float32",
    num_threads: int | None = None,
    loudness: float = 1.0,
) -> PagedBatch:
    """`sequences` as (length, new tokens), written in two goes, in a storage full of NaN.

    The layer is the middle one of three of different shapes, 2 heads of 16 numbers unless given.
    """
    shape = shape or LayerShape(2, 16, 16)
    needed = [-(-length // block_size) for length, _ in sequences]
    num_blocks = sum(needed) + 2
    layers = [LayerShape(1, 8, 24), shape, LayerShape(3, 8, 8)]
    storage = KVStorage(num_blocks, block_size, layers, dtype=dtype, num_threads=num_threads)
    fill_with_nan(storage)
    # Behind a sequence's end the table may hold anything.
    tables = rng.integers(-9, 10**9, (len(sequences), max(needed) + 1)).astype(np.int32)
    free = rng.permutation(num_blocks).astype(np.int32)
    starts = np.cumsum([0] + [new for _, new in sequences])
    num_heads = shape.num_kv_heads * heads_each
    q = rng.standard_normal((starts[-1], num_heads, shape.key_dim), dtype=np.float32) * loudness
    lengths = np.array([length for length, _ in sequences])
    batch = PagedBatch(storage, 1, tables, lengths, starts, q.astype(np.float32))
    taken = 0
    for i, (length, new) in enumerate(sequences):
        tables[i, : needed[i]] = free[taken : taken + needed[i]]
        taken += needed[i]
        k = rng.standard_normal((length, shape.num_kv_heads, shape.key_dim), dtype=np.float32)
        v = rng.standard_normal((length, shape.num_kv_heads, shape.value_dim), dtype=np.float32)
        for start, stop in ((0, length - new), (length - new, length)):
            slots = slots_of(tables[i], start, stop, block_size)
            storage.write(1, k[start:stop], v[start:stop], slots)
        if dtype != "float32":
            k, v = rounded(k, dtype), rounded(v, dtype)
        batch.k.append(k)
        batch.v.append(v)
    return batch


def rounded(numbers: NDArray[np.float32], dtype: str) -> NDArray[np.float32]:
    """To the nearest number that `dtype` has, even where two are."""
    if dtype == "float16":
        return numbers.astype(np.float16).astype(np.float32)
    # bfloat16 has 8 bits of fraction, the leading one included; numpy rounds to even.
    fraction, exponent = np.frexp(numbers.astype(np.float64))
    return np.ldexp(np.round(fraction * 256) / 256, exponent).astype(np.float32)


def relative_error(result: NDArray[Any], expected: NDArray[np.float64]) -> float:
    """The largest difference, as a share of the largest number of its row; inf for a NaN."""
    result = np.asarray(result, dtype=np.float64)
    if not np.isfinite(result).all():
        return np.inf
    if not result.size:
        return 0.0
    scale = np.abs(expected).max(axis=-1, keepdims=True)
    return float((np.abs(result - expected) / np.maximum(scale, 1e-3)).max())
