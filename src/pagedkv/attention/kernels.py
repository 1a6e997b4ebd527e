"""Attention over block tables on CPUs, compiled once for each shape of a layer.

Scores are kept as powers of two: queries are multiplied with the scale and with log2(e), once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numba import carray
from numpy.typing import NDArray

from pagedkv.attention import work
from pagedkv.attention.vector_code import HOST_LANES, LANE_ROWS, LANE_VECTORS
from pagedkv.attention.vectors import (
    cap,
    claim,
    copy_row,
    highest,
    lanes_for,
    rows_at_once,
    score_lanes,
    score_rows,
    soften,
    soften_lanes,
    value_lanes,
    value_rows,
    widen_row,
)
from pagedkv.attention.work import (
    FIRST,
    FIRST_ROW,
    HEAD,
    IS_MANY,
    LEADER,
    NUM_ROWS,
    PARTS,
    PLACE,
    SEQUENCE,
    STOP,
)
from pagedkv.compiling import CompiledTask, compiled_in_place, numbers_at

(NEXT, THREADS, FIRST_LEADER) = range(3)
"""Places in the counters: the next piece to take, threads so far, then one for each piece's parts.
"""

FEW_CHUNK = 32
"""Tokens whose scores are made before their values are read.

While the keys, then the values, of one chunk are used, those of the next are asked for: long enough
ahead for memory to answer, few enough for the second level of the cache to hold."""

MANY_CHUNK = 96
"""Tokens that are gathered at once for many queries; a multiple of `LANE_ROWS`."""

WIDTH = HOST_LANES * LANE_VECTORS
"""Queries in a panel."""

NOTHING = np.float32(-1e30)
"""Below every score, and finite: of two infinities there is no difference."""

(
    PAGE_NUMBERS,
    BLOCK_SIZE,
    KEYS,
    VALUES,
    TOKEN_STRIDE,
    HEAD_STRIDE,
    OUT_TOKEN_STRIDE,
    OUT_HEAD_STRIDE,
    WINDOW,
    CHUNK,
    SCRATCH_EACH,
    NUM_INTEGERS,
) = range(12)
"""Places in the integers that a kernel is given."""


def num_scratch(heads: int, most_rows: int, key_dim: int, value_dim: int) -> int:
    """Floats that one thread needs for pieces of up to `most_rows` rows."""
    floats = value_dim + heads * (key_dim + value_dim + FEW_CHUNK + 3)
    if most_rows > heads or most_few(heads) == 0:
        width = -(-most_rows // WIDTH) * WIDTH
        floats = value_dim + width * (key_dim + value_dim + 2)
        floats += MANY_CHUNK * (key_dim + value_dim + WIDTH) + WIDTH
    return -(-floats // 16) * 16  # whole lines of the cache, for each thread its own


NUM_ROWS_OF_SCRATCH = 4 * max(FEW_CHUNK, MANY_CHUNK)
"""Places of rows that one thread needs."""


def most_few(heads: int) -> int:
    """Up to how many rows of a KV head are few; more fill the lanes of a vector better."""
    return heads * max(1, 8 // heads) if heads <= 8 else 0


Kernel = Callable[..., Any]

(STORAGE, Q, OUT, TABLES, LENGTHS, STARTS, PIECES, COUNTERS) = range(8)
(PARTS_KEPT, SINKS, INTEGERS, FACTORS, SCRATCH, ROWS) = range(8, 14)
"""The arrays that a kernel takes, in their order. Of each, a task is told address and size."""

TABLE_WIDTH = 2 * (ROWS + 1)
NUM_NUMBERS = TABLE_WIDTH + 1
"""Numbers of a task: those of the arrays, then the width of the block tables."""


class BatchKernel(NamedTuple):
    """Attention of a batch that is cut into pieces, for layers of one shape."""

    take: Kernel
    """`take(*arrays)` takes pieces until none is left."""
    task: CompiledTask
    """The same by addresses, for `Threads`."""


@functools.cache
def few_queries(heads: int, key_dim: int, value_dim: int, half: int) -> Kernel:
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


@functools.cache
def many_queries(heads: int, key_dim: int, value_dim: int, half: int) -> Kernel:
    """The kernel for many queries of one KV head: a query in each lane.

    Bound by arithmetic: a chunk of K and V is gathered, as floats, and then meets every panel of
    queries that sees it. Nothing is ever summed across lanes.
    """

    @compiled_in_place
    def attend(
        storage: NDArray[Any],
        table: NDArray[np.int32],
        first: int,
        stop: int,
        head: int,
        integers: NDArray[np.int64],
        soft_cap: float,
        before: int,
        num_rows: int,
        q: NDArray[np.float32],
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

    return attend


@functools.cache
def kernel(heads: int, key_dim: int, value_dim: int, half: int, half_queries: bool) -> BatchKernel:
    """Attention of a batch, cut into pieces, on all threads.

    `heads` query heads share a KV head; `half` tells what uint16 numbers are, and `half_queries`
    whether queries and outputs are such.
    """
    few = few_queries(heads, key_dim, value_dim, half)
    many = many_queries(heads, key_dim, value_dim, half)

    @compiled_in_place
    def finish(
        top: Any,
        total: Any,
        sinks: NDArray[np.float32],
        query_head: int,
        row: NDArray[np.float32],
        out: NDArray[Any],
        place: int,
    ) -> None:
        """One row's weighted sum becomes its output."""
        if len(sinks):
            # Measured against the higher of both, or one may be too large for a float.
            sink = sinks[query_head]
            higher = max(top, sink)
            fade = np.float32(np.exp2(top - higher))
            total = total * fade + np.float32(np.exp2(sink - higher))
            for d in range(value_dim):
                row[d] *= fade
        total = np.float32(1) / np.float32(total)
        for d in range(value_dim):
            row[d] *= total
        copy_row(row, 0, out, place, value_dim, half)

    @compiled_in_place
    def line_of(
        piece: NDArray[np.int64],
        i: int,
        sum_of_values: NDArray[np.float32],
        line: NDArray[np.float32],
    ) -> None:
        """Row `i` of a piece's sums, from its panel where there are panels."""
        if piece[IS_MANY]:
            base = i // WIDTH * WIDTH * value_dim + i % WIDTH
            for d in range(value_dim):
                line[d] = sum_of_values[base + d * WIDTH]
        else:
            for d in range(value_dim):
                line[d] = sum_of_values[i * value_dim + d]

    @compiled_in_place
    def keep(
        piece: NDArray[np.int64],
        tops: NDArray[np.float32],
        sums: NDArray[np.float32],
        sum_of_values: NDArray[np.float32],
        parts: NDArray[np.float32],
    ) -> None:
        """Put a part where the others of the same rows are put."""
        for i in range(piece[NUM_ROWS]):
            at = piece[PLACE] + i * (value_dim + 2)
            parts[at] = tops[i]
            parts[at + 1] = sums[i]
            line_of(piece, i, sum_of_values, parts[at + 2 : at + 2 + value_dim])

    @compiled_in_place
    def merge(
        pieces: NDArray[np.int64],
        leader: int,
        i: int,
        parts: NDArray[np.float32],
        line: NDArray[np.float32],
    ) -> tuple[Any, Any]:
        """Row `i` of all parts put together, in order: its highest score and sum of weights."""
        num_parts = pieces[leader, PARTS]
        top = NOTHING
        for part in range(leader, leader + num_parts):
            top = max(top, parts[pieces[part, PLACE] + i * (value_dim + 2)])
        total = np.float32(0)
        for d in range(value_dim):
            line[d] = 0
        for part in range(leader, leader + num_parts):
            at = pieces[part, PLACE] + i * (value_dim + 2)
            fade = np.float32(np.exp2(parts[at] - top))
            total += parts[at + 1] * fade
            for d in range(value_dim):
                line[d] += parts[at + 2 + d] * fade
        return top, total

    @compiled_in_place
    def take(
        storage: NDArray[Any],
        q: NDArray[Any],
        out: NDArray[Any],
        tables: NDArray[np.int32],
        lengths: NDArray[np.int64],
        starts: NDArray[np.int64],
        pieces: NDArray[np.int64],
        counters: NDArray[np.int64],
        parts: NDArray[np.float32],
        sinks: NDArray[np.float32],
        integers: NDArray[np.int64],
        factors: NDArray[np.float32],
        scratch: NDArray[np.float32],
        rows: NDArray[np.int64],
    ) -> None:
        """Take pieces until none is left. Each thread has its share of scratch and rows."""
        thread = claim(counters, THREADS)
        size = integers[SCRATCH_EACH]
        scratch = scratch[thread * size : (thread + 1) * size]
        rows = rows[thread * NUM_ROWS_OF_SCRATCH : (thread + 1) * NUM_ROWS_OF_SCRATCH]
        while True:
            number = claim(counters, NEXT)
            if number >= len(pieces):
                break
            piece = pieces[number]
            sequence, head, first_row = piece[SEQUENCE], piece[HEAD], piece[FIRST_ROW]
            num_rows = piece[NUM_ROWS]
            start = starts[sequence]
            before = lengths[sequence] - (starts[sequence + 1] - start)
            width = (num_rows + WIDTH - 1) // WIDTH * WIDTH if piece[IS_MANY] else num_rows
            at = value_dim
            line = scratch[:at]
            queries = scratch[at : at + width * key_dim]
            at += width * key_dim
            tops = scratch[at : at + width]
            at += width
            sums = scratch[at : at + width]
            at += width
            sum_of_values = scratch[at : at + width * value_dim]
            at += width * value_dim
            rest = scratch[at:]
            for i in range(num_rows):
                token, query_head = (first_row + i) // heads, (first_row + i) % heads
                place = (start + token) * integers[TOKEN_STRIDE] + (
                    head * heads + query_head
                ) * integers[HEAD_STRIDE]
                if piece[IS_MANY]:
                    widen_row(q, place, rest, 0, key_dim, half)
                    base = i // WIDTH * WIDTH * key_dim + i % WIDTH
                    for d in range(key_dim):
                        queries[base + d * WIDTH] = rest[d] * factors[0]
                else:
                    widen_row(q, place, queries, i * key_dim, key_dim, half)
            if piece[IS_MANY]:
                for i in range(num_rows, width):
                    base = i // WIDTH * WIDTH * key_dim + i % WIDTH
                    for d in range(key_dim):
                        queries[base + d * WIDTH] = 0
                many(
                    storage,
                    tables[sequence],
                    piece[FIRST],
                    piece[STOP],
                    head,
                    integers,
                    factors[1],
                    before + first_row // heads,
                    num_rows,
                    queries,
                    tops,
                    sums,
                    sum_of_values,
                    rest,
                    rows,
                )
            else:
                for i in range(num_rows * key_dim):
                    queries[i] *= factors[0]
                few(
                    storage,
                    tables[sequence],
                    piece[FIRST],
                    piece[STOP],
                    head,
                    integers,
                    factors[1],
                    queries,
                    tops,
                    sums,
                    sum_of_values,
                    rest[: heads * FEW_CHUNK],
                    rest[heads * FEW_CHUNK :],
                    rows,
                )
            if piece[PARTS] > 1:
                keep(piece, tops, sums, sum_of_values, parts)
                leader, num_parts = piece[LEADER], piece[PARTS]
                if claim(counters, FIRST_LEADER + leader) + 1 < num_parts:
                    continue
            for i in range(num_rows):
                token, query_head = (first_row + i) // heads, (first_row + i) % heads
                query_head += head * heads
                if piece[PARTS] > 1:
                    top, total = merge(pieces, piece[LEADER], i, parts, line)
                else:
                    top, total = tops[i], sums[i]
                    line_of(piece, i, sum_of_values, line)
                place = (start + token) * integers[OUT_TOKEN_STRIDE] + query_head * integers[
                    OUT_HEAD_STRIDE
                ]
                finish(top, total, sinks, query_head, line, out, place)

    kind = "uint16" if half else "float32"
    query_kind = "uint16" if half_queries else "float32"

    def take_by_addresses(numbers: Any) -> None:
        num_sequences = numbers[2 * LENGTHS + 1]
        take(
            carray(numbers_at(numbers[2 * STORAGE], kind), numbers[2 * STORAGE + 1]),
            carray(numbers_at(numbers[2 * Q], query_kind), numbers[2 * Q + 1]),
            carray(numbers_at(numbers[2 * OUT], query_kind), numbers[2 * OUT + 1]),
            carray(numbers_at(numbers[2 * TABLES], "int32"), (num_sequences, numbers[TABLE_WIDTH])),
            carray(numbers_at(numbers[2 * LENGTHS], "int64"), num_sequences),
            carray(numbers_at(numbers[2 * STARTS], "int64"), num_sequences + 1),
            carray(
                numbers_at(numbers[2 * PIECES], "int64"),
                (numbers[2 * PIECES + 1] // work.COLUMNS, work.COLUMNS),
            ),
            carray(numbers_at(numbers[2 * COUNTERS], "int64"), numbers[2 * COUNTERS + 1]),
            carray(numbers_at(numbers[2 * PARTS_KEPT], "float32"), numbers[2 * PARTS_KEPT + 1]),
            carray(numbers_at(numbers[2 * SINKS], "float32"), numbers[2 * SINKS + 1]),
            carray(numbers_at(numbers[2 * INTEGERS], "int64"), NUM_INTEGERS),
            carray(numbers_at(numbers[2 * FACTORS], "float32"), 2),
            carray(numbers_at(numbers[2 * SCRATCH], "float32"), numbers[2 * SCRATCH + 1]),
            carray(numbers_at(numbers[2 * ROWS], "int64"), numbers[2 * ROWS + 1]),
        )

    return BatchKernel(take, CompiledTask(take_by_addresses))
