"""Attention of many queries in bfloat16, where the CPU has tiles."""

from __future__ import annotations

import functools

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
from pagedkv.attention.many_queries import ManyQueries
from pagedkv.attention.tiles import (
    STEP,
    TILE_ROWS,
    begin_tiles,
    copy_numbers,
    end_tiles,
    score_tiles,
    soften_pairs,
    turn_pairs,
    turn_rows,
    value_tiles,
)
from pagedkv.attention.vectors import cap
from pagedkv.compiling import compiled_in_place


@functools.cache
def many_queries_tiled(heads: int, key_dim: int, value_dim: int, half: int) -> ManyQueries:
    """`many_queries` of what `fits_tiles`: products in tiles, the softmax between in vectors.

    The weights of a chunk are rounded to bfloat16 before they meet its values; their sum is not.
    """

    @compiled_in_place
    def lay(
        q: NDArray[np.uint16],
        start: int,
        first_row: int,
        num_rows: int,
        head: int,
        integers: NDArray[np.int64],
        factors: NDArray[np.float32],
        queries: NDArray[np.float32],
        room: NDArray[np.float32],
    ) -> None:
        panels, lines = queries.view(np.uint16), room.view(np.uint16)
        for first in range(0, -(-num_rows // WIDTH) * WIDTH, TILE_ROWS):
            for i in range(TILE_ROWS):
                row = first_row + min(first + i, num_rows - 1)
                place = (start + row // heads) * integers[TOKEN_STRIDE] + (
                    head * heads + row % heads
                ) * integers[HEAD_STRIDE]
                copy_numbers(q, place, lines, i * key_dim, key_dim)
            turn_pairs(lines, panels, first // WIDTH * WIDTH * key_dim + first % WIDTH * 2, key_dim)

    @compiled_in_place
    def attend(
        storage: NDArray[np.uint16],
        table: NDArray[np.int32],
        first: int,
        stop: int,
        head: int,
        integers: NDArray[np.int64],
        factors: NDArray[np.float32],
        before: int,
        num_rows: int,
        queries: NDArray[np.float32],
        tops: NDArray[np.float32],
        sums: NDArray[np.float32],
        out: NDArray[np.float32],
        scratch: NDArray[np.float32],
        rows: NDArray[np.int64],
    ) -> None:
        num_panels = (num_rows + WIDTH - 1) // WIDTH
        for i in range(num_panels * WIDTH):
            tops[i] = NOTHING
            sums[i] = 0
        for i in range(num_panels * WIDTH * value_dim):
            out[i] = 0
        panels = queries.view(np.uint16)
        scores = scratch[: MANY_CHUNK * WIDTH]
        fading = scratch[MANY_CHUNK * WIDTH : MANY_CHUNK * WIDTH + WIDTH]
        halves = scratch[MANY_CHUNK * WIDTH + WIDTH :].view(np.uint16)
        keys = halves[: MANY_CHUNK * key_dim]
        at = MANY_CHUNK * key_dim
        values = halves[at : at + MANY_CHUNK * value_dim]
        at += MANY_CHUNK * value_dim
        turned = halves[at : at + MANY_CHUNK * value_dim]
        at += MANY_CHUNK * value_dim
        weights = halves[at : at + MANY_CHUNK * WIDTH]
        block_size = integers[BLOCK_SIZE]
        soft_cap = factors[1]
        begin_tiles()
        while first < stop:
            end = min(stop, (first // MANY_CHUNK + 1) * MANY_CHUNK)
            for i in range(end - first):
                logical_block = (first + i) // block_size
                offset = first + i - logical_block * block_size
                page = np.int64(table[logical_block]) * integers[PAGE_NUMBERS]
                row = head * block_size + offset
                copy_numbers(
                    storage, page + integers[KEYS] + row * key_dim, keys, i * key_dim, key_dim
                )
                copy_numbers(
                    storage,
                    page + integers[VALUES] + row * value_dim,
                    values,
                    i * value_dim,
                    value_dim,
                )
            # They meet weights of 0, so they must be numbers.
            for i in range((end - first) * value_dim, MANY_CHUNK * value_dim):
                values[i] = 0
            turn_rows(values, turned, MANY_CHUNK, value_dim)
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
                whole = -(-count // STEP) * STEP
                score_tiles(keys, panels, first_lane * key_dim, scores, whole, key_dim)
                factor = factors[0]
                if soft_cap > 0:
                    for i in range(count * WIDTH):
                        scores[i] *= factor
                    cap(scores, 0, count * WIDTH, soft_cap)
                    factor = np.float32(1)
                for i in range(max(earliest + 1 - first, 0), count):
                    # The lanes of earlier tokens than this.
                    stop_lane = (first + i - before) * heads - first_lane
                    for lane in range(stop_lane):
                        scores[i * WIDTH + lane] = -np.inf
                for i in range(count * WIDTH, whole * WIDTH):
                    scores[i] = -np.inf
                if first < seen_by_all:
                    for lane in range(WIDTH):
                        position = before + (first_lane + min(lane, num_lanes - 1)) // heads
                        low = work.first_of(position, integers[WINDOW], integers[CHUNK]) - first
                        for i in range(min(low, count)):
                            scores[i * WIDTH + lane] = -np.inf
                soften_pairs(scores, whole, factor, tops, sums, first_lane, fading, weights)
                value_tiles(
                    weights,
                    turned,
                    whole,
                    fading,
                    out,
                    first_lane * value_dim,
                    MANY_CHUNK,
                    value_dim,
                )
            first = end
        end_tiles()

    return ManyQueries(lay, attend)
