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
from pagedkv.attention.arguments import (
    COUNTERS,
    FACTORS,
    FEW_CHUNK,
    FIRST_LEADER,
    HEAD_STRIDE,
    INTEGERS,
    LENGTHS,
    NEXT,
    NOTHING,
    NUM_INTEGERS,
    NUM_ROWS_OF_SCRATCH,
    OUT,
    OUT_HEAD_STRIDE,
    OUT_TOKEN_STRIDE,
    PARTS_KEPT,
    PIECES,
    ROWS,
    SCRATCH,
    SCRATCH_EACH,
    SINKS,
    STARTS,
    STORAGE,
    TABLE_WIDTH,
    TABLES,
    THREADS,
    TOKEN_STRIDE,
    WIDTH,
    Q,
)
from pagedkv.attention.few_queries import few_queries
from pagedkv.attention.many_queries import many_queries
from pagedkv.attention.many_queries_tiled import many_queries_tiled
from pagedkv.attention.vectors import claim, copy_row, widen_row
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


class BatchKernel(NamedTuple):
    """Attention of a batch that is cut into pieces, for layers of one shape."""

    take: Callable[..., Any]
    """`take(*arrays)` takes pieces until none is left."""
    task: CompiledTask
    """The same by addresses, for `Threads`."""


@functools.cache
def kernel(
    heads: int, key_dim: int, value_dim: int, half: int, half_queries: bool, is_tiled: bool
) -> BatchKernel:
    """Attention of a batch, cut into pieces, on all threads.

    `heads` query heads share a KV head; `half` tells what uint16 numbers are, and `half_queries`
    whether queries and outputs are such. With `is_tiled` many queries go to the tiles, for all
    that `fits_tiles`.
    """
    few = few_queries(heads, key_dim, value_dim, half)
    made = many_queries_tiled if is_tiled else many_queries
    lay, many = made(heads, key_dim, value_dim, half)

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
            if piece[IS_MANY]:
                lay(q, start, first_row, num_rows, head, integers, factors, queries, rest)
                many(
                    storage,
                    tables[sequence],
                    piece[FIRST],
                    piece[STOP],
                    head,
                    integers,
                    factors,
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
                for i in range(num_rows):
                    token, query_head = (first_row + i) // heads, (first_row + i) % heads
                    place = (start + token) * integers[TOKEN_STRIDE] + (
                        head * heads + query_head
                    ) * integers[HEAD_STRIDE]
                    widen_row(q, place, queries, i * key_dim, key_dim, half)
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
