"""Attention of many queries: bound by arithmetic on floats."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pagedkv.attention import work
from pagedkv.attention.arguments import (
    BLOCK_SIZE,
    CHUNK,
    HEAD_STRIDE,
    KEYS,
    MANY_CHUNK,
    NOTHING,
    PAGE_NUMBERS,
    TOKEN_STRIDE,
    VALUES,
    WIDTH,
    WINDOW,
)
from pagedkv.attention.vector_code import LANE_ROWS
from pagedkv.attention.vectors import cap, score_lanes, soften_lanes, value_lanes, widen_row
from pagedkv.compiling import compiled_in_place


class ManyQueries(NamedTuple):
    """The kernel for many queries of one KV head, in panels of `WIDTH`: a query in each lane."""

    lay: Callable[..., Any]
    """Lays the queries of a piece into panels, as `attend` wants them."""
    attend: Callable[..., Any]


@functools.cache
def many_queries(heads: int, key_dim: int, value_dim: int, half: int) -> ManyQueries:
    """The kernel that needs nothing but vectors of floats.

    A chunk of K and V is gathered, as floats, and then meets every panel of queries that sees it.
    Nothing is ever summed across lanes.
    """

    @compiled_in_place
    def lay(
        q: NDArray[Any],
        start: int,
        first_row: int,
        num_rows: int,
        head: int,
        integers: NDArray[np.int64],
        factors: NDArray[np.float32],
        queries: NDArray[np.float32],
        room: NDArray[np.float32],
    ) -> None:
        for i in range(num_rows):
            token, query_head = (first_row + i) // heads, (first_row + i) % heads
            place = (start + token) * integers[TOKEN_STRIDE] + (
                head * heads + query_head
            ) * integers[HEAD_STRIDE]
            widen_row(q, place, room, 0, key_dim, half)
            base = i // WIDTH * WIDTH * key_dim + i % WIDTH
            for d in range(key_dim):
                queries[base + d * WIDTH] = room[d] * factors[0]
        for i in range(num_rows, -(-num_rows // WIDTH) * WIDTH):
            base = i // WIDTH * WIDTH * key_dim + i % WIDTH
            for d in range(key_dim):
                queries[base + d * WIDTH] = 0

    @compiled_in_place
    def attend(
        storage: NDArray[Any],
        table: NDArray[np.int32],
        first: int,
        stop: int,
        head: int,
        integers: NDArray[np.int64],
        factors: NDArray[np.float32],
        before: int,
        num_rows: int,
        q: NDArray[np.float32],
        tops: NDArray[np.float32],
        sums: NDArray[np.float32],
        out: NDArray[np.float32],
        scratch: NDArray[np.float32],
        rows: NDArray[np.int64],
    ) -> None:
        soft_cap = factors[1]
        num_panels = (num_rows + WIDTH - 1) // WIDTH
        for i in range(num_panels * WIDTH):
            tops[i] = NOTHING
            sums[i] = 0
        for i in range(num_panels * WIDTH * value_dim):
            out[i] = 0
        keys = scratch[: MANY_CHUNK * key_dim]
        values = scratch[MANY_CHUNK * key_dim : MANY_CHUNK * (key_dim + value_dim)]
        at = MANY_CHUNK * (key_dim + value_dim)
        scores = scratch[at : at + MANY_CHUNK * WIDTH]
        fading = scratch[at + MANY_CHUNK * WIDTH : at + MANY_CHUNK * WIDTH + WIDTH]
        key_rows, value_rows = rows[:MANY_CHUNK], rows[MANY_CHUNK : 2 * MANY_CHUNK]
        for i in range(MANY_CHUNK):
            key_rows[i] = i * key_dim
            value_rows[i] = i * value_dim
        block_size = integers[BLOCK_SIZE]
        while first < stop:
            end = min(stop, (first // MANY_CHUNK + 1) * MANY_CHUNK)
            for i in range(end - first):
                logical_block = (first + i) // block_size
                offset = first + i - logical_block * block_size
                page = np.int64(table[logical_block]) * integers[PAGE_NUMBERS]
                row = head * block_size + offset
                widen_row(
                    storage, page + integers[KEYS] + row * key_dim, keys, i * key_dim, key_dim, half
                )
                widen_row(
                    storage,
                    page + integers[VALUES] + row * value_dim,
                    values,
                    i * value_dim,
                    value_dim,
                    half,
                )
            for panel in range(num_panels):
                first_lane = panel * WIDTH
                num_lanes = min(WIDTH, num_rows - first_lane)
                earliest = before + first_lane // heads
                latest = before + (first_lane + num_lanes - 1) // heads
                first_seen = work.first_of(earliest, integers[WINDOW], integers[CHUNK])
                seen_by_all = work.first_of(latest, integers[WINDOW], integers[CHUNK])
                count = min(end, latest + 1) - first
                if count <= 0 or end <= first_seen:
                    continue
                for i in range(0, count, LANE_ROWS):
                    score_lanes(keys, key_rows, i, q, first_lane * key_dim, scores, key_dim)
                if soft_cap > 0:
                    cap(scores, 0, count * WIDTH, soft_cap)
                if first < seen_by_all or first + count > earliest + 1:
                    for lane in range(WIDTH):
                        position = before + (first_lane + min(lane, num_lanes - 1)) // heads
                        low = work.first_of(position, integers[WINDOW], integers[CHUNK]) - first
                        for i in range(min(low, count)):
                            scores[i * WIDTH + lane] = -np.inf
                        for i in range(max(position + 1 - first, 0), count):
                            scores[i * WIDTH + lane] = -np.inf
                soften_lanes(scores, count, tops, sums, first_lane, fading)
                value_lanes(
                    scores,
                    values,
                    value_rows,
                    count,
                    fading,
                    out,
                    first_lane * value_dim,
                    value_dim,
                )
            first = end

    return ManyQueries(lay, attend)
