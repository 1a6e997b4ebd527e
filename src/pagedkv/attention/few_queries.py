"""Attention of one token's queries: bound by reading keys and values."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedkv.attention.arguments import BLOCK_SIZE, FEW_CHUNK, KEYS, NOTHING, PAGE_NUMBERS, VALUES
from pagedkv.attention.vector_code import HOST_LANES
from pagedkv.attention.vectors import (
    cap,
    highest,
    lanes_for,
    rows_at_once,
    score_rows,
    soften,
    value_rows,
)
from pagedkv.compiling import compiled_in_place


@functools.cache
def few_queries(heads: int, key_dim: int, value_dim: int, half: int) -> Callable[..., Any]:
    """The kernel for one token's queries, `heads` of them for one KV head.

    Bound by reading: each key and value is read once, for all heads, in runs as long as a block
    allows, and is asked for one chunk before it is used.
    """
    tile = rows_at_once(heads, lanes_for(key_dim))

    @compiled_in_place
    def places(
        table: NDArray[np.int32],
        first: int,
        stop: int,
        head: int,
        integers: NDArray[np.int64],
        keys: NDArray[np.int64],
        values: NDArray[np.int64],
    ) -> None:
        """Where the keys and values of tokens `first` to `stop` begin.

        The last is repeated to a whole number of tiles: those scores are computed, never used.
        """
        block_size = integers[BLOCK_SIZE]
        logical_block = first // block_size
        offset = first - logical_block * block_size
        key_start = integers[KEYS] + head * block_size * key_dim
        value_start = integers[VALUES] + head * block_size * value_dim
        i = 0
        count = stop - first
        while i < count:
            page = np.int64(table[logical_block]) * integers[PAGE_NUMBERS]
            for token in range(offset, min(block_size, offset + count - i)):
                keys[i] = page + key_start + token * key_dim
                values[i] = page + value_start + token * value_dim
                i += 1
            offset = 0
            logical_block += 1
        for j in range(count, (count + tile - 1) // tile * tile):
            keys[j] = keys[count - 1]
            values[j] = values[count - 1]

    @compiled_in_place
    def attend(
        storage: NDArray[Any],
        table: NDArray[np.int32],
        first: int,
        stop: int,
        head: int,
        integers: NDArray[np.int64],
        soft_cap: float,
        q: NDArray[np.float32],
        tops: NDArray[np.float32],
        sums: NDArray[np.float32],
        out: NDArray[np.float32],
        scores: NDArray[np.float32],
        fading: NDArray[np.float32],
        rows: NDArray[np.int64],
    ) -> None:
        keys, values = rows[:FEW_CHUNK], rows[FEW_CHUNK : 2 * FEW_CHUNK]
        next_keys = rows[2 * FEW_CHUNK : 3 * FEW_CHUNK]
        next_values = rows[3 * FEW_CHUNK : 4 * FEW_CHUNK]
        for i in range(heads * value_dim):
            out[i] = 0
        for i in range(heads):
            tops[i] = NOTHING
            sums[i] = 0
        end = min(stop, (first // FEW_CHUNK + 1) * FEW_CHUNK)
        places(table, first, end, head, integers, keys, values)
        for i in range(FEW_CHUNK):  # what follows the only chunk: nothing worth asking for
            next_keys[i], next_values[i] = keys[0], values[0]
        while first < stop:
            count = end - first
            whole = (count + HOST_LANES - 1) // HOST_LANES * HOST_LANES
            first = end
            end = min(stop, first + FEW_CHUNK)
            if first < stop:
                places(table, first, end, head, integers, next_keys, next_values)
            for i in range(0, count, tile):
                score_rows(
                    q, storage, keys, i, scores, FEW_CHUNK, next_keys, heads, key_dim, key_dim, half
                )
            for i in range(heads):
                at = i * FEW_CHUNK
                if soft_cap > 0:
                    cap(scores, at, whole, soft_cap)
                for j in range(count, whole):
                    scores[at + j] = -np.inf
                top = max(tops[i], highest(scores, at, whole))
                fading[i] = np.exp2(tops[i] - top)
                sums[i] = sums[i] * fading[i] + soften(scores, at, whole, top)
                tops[i] = top
            value_rows(
                scores,
                FEW_CHUNK,
                storage,
                values,
                count,
                fading,
                out,
                next_values,
                heads,
                value_dim,
                value_dim,
                half,
            )
            keys, next_keys = next_keys, keys
            values, next_values = next_values, values

    return attend
