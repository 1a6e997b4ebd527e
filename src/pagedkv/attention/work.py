"""Attention cut into pieces of work that threads take one after the other.

One piece is one KV head of one sequence: some of its queries over a span of its context. Long
contexts are cut at fixed positions, so that one long sequence occupies all threads, and the
parts are put together in order by whoever ends the last (as in flash-decoding). Where it is cut
depends on the sequence alone: neither the batch around it nor the number of threads changes a
bit of its result.

A *row* is one query of one head; the rows of a piece are the tokens of its sequence's queries,
and for each the heads that share the KV head. Few rows go to `few_queries`, many to
`many_queries`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pagedkv.compiling import compiled

SEQUENCE, HEAD, FIRST_ROW, NUM_ROWS, FIRST, STOP, PLACE, LEADER, PARTS, IS_MANY = range(10)
"""Columns of a piece: whose, which KV head, rows, tokens `FIRST` to `STOP` (half open), where its
part goes, the first piece of the same rows, how many pieces these rows have, which kernel."""
COLUMNS = 10

FEW_SPAN = 1024
"""Tokens of a piece of few rows."""
MANY_SPAN = 96 * 43
"""Tokens of a piece of many rows."""
MANY_ROWS = 256
"""Rows of a piece of many, so that what is read of K and V once serves them all."""

(GOOD, BAD_STARTS, BAD_LENGTH, NARROW_TABLE, BAD_BLOCK) = range(5)


@compiled
def cut(
    tables: NDArray[np.int32],
    lengths: NDArray[np.int64],
    starts: NDArray[np.int64],
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    heads_each: int,
    value_dim: int,
    window: int,
    chunk: int,
    most_few: int,
) -> tuple[int, int, NDArray[np.int64], int, int, int]:
    """The pieces of a batch: (`GOOD`, 0, pieces [n, COLUMNS], floats of parts, scores, most rows).

    The parts of what is cut in several need so many floats; so many scores are to be computed;
    and a piece has so many rows at most. Or what is wrong, and with which sequence. `window` and
    `chunk` are 0 where there is none; up to `most_few` rows a KV head are few.
    """
    none = np.empty((0, COLUMNS), dtype=np.int64)
    if len(starts) != len(lengths) + 1 or starts[0] != 0:
        return BAD_STARTS, 0, none, 0, 0, 0
    room = 0
    for sequence in range(len(lengths)):
        num_queries = starts[sequence + 1] - starts[sequence]
        length = lengths[sequence]
        if num_queries < 0:
            return BAD_STARTS, sequence, none, 0, 0, 0
        if length < num_queries:
            return BAD_LENGTH, sequence, none, 0, 0, 0
        if num_queries == 0:
            continue
        if length > tables.shape[1] * block_size:
            return NARROW_TABLE, sequence, none, 0, 0, 0
        first = first_of(length - num_queries, window, chunk)
        for i in range(first // block_size, (length - 1) // block_size + 1):
            if tables[sequence, i] < 0 or tables[sequence, i] >= num_blocks:
                return BAD_BLOCK, sequence, none, 0, 0, 0
        is_many, rows, span = shape_of(num_queries, heads_each, most_few)
        num_groups = (num_queries * heads_each + rows - 1) // rows
        room += num_groups * ((length - 1) // span + 1 - first // span)
    pieces = np.empty((room * num_kv_heads, COLUMNS), dtype=np.int64)
    count = 0
    place = 0
    num_scores = 0
    most_rows = 0
    for sequence in range(len(lengths)):
        num_queries = starts[sequence + 1] - starts[sequence]
        is_many, rows, span = shape_of(num_queries, heads_each, most_few)
        total = num_queries * heads_each
        before = lengths[sequence] - num_queries
        for first_row in range(0, total, rows):
            num_rows = min(rows, total - first_row)
            first = first_of(before + first_row // heads_each, window, chunk)
            stop = before + (first_row + num_rows - 1) // heads_each + 1
            num_scores += (stop - first) * num_rows * num_kv_heads
            most_rows = max(most_rows, num_rows)
            num_parts = (stop - 1) // span + 1 - first // span
            for head in range(num_kv_heads):
                for part in range(num_parts):
                    piece = pieces[count + part]
                    piece[SEQUENCE] = sequence
                    piece[HEAD] = head
                    piece[FIRST_ROW] = first_row
                    piece[NUM_ROWS] = num_rows
                    piece[FIRST] = max(first, (first // span + part) * span)
                    piece[STOP] = min(stop, (first // span + part + 1) * span)
                    piece[PLACE] = place
                    piece[LEADER] = count
                    piece[PARTS] = num_parts
                    piece[IS_MANY] = is_many
                    if num_parts > 1:
                        place += num_rows * (value_dim + 2)
                count += num_parts
    return GOOD, 0, pieces[:count], place, num_scores, most_rows


@compiled
def shape_of(num_queries: int, heads_each: int, most_few: int) -> tuple[int, int, int]:
    """Whether a sequence's rows are many, rows of a piece, and tokens of a piece."""
    if num_queries * heads_each > most_few:
        return 1, max(MANY_ROWS // heads_each, 1) * heads_each, MANY_SPAN
    return 0, heads_each, FEW_SPAN


@compiled
def first_of(position: int, window: int, chunk: int) -> int:
    """The first token that the one at `position` attends to; no window or chunk is 0."""
    first = 0
    if window > 0:
        first = max(first, position - window + 1)
    if chunk > 0:
        first = max(first, position // chunk * chunk)
    return first


def problem(status: int, sequence: int, block_size: int, num_blocks: int) -> str:
    """What `cut` found wrong, as one line."""
    return {
        BAD_STARTS: "query_starts must begin with 0, never fall and have one entry more than "
        "lengths",
        BAD_LENGTH: f"lengths[{sequence}] is below the number of its queries: it counts them too",
        NARROW_TABLE: f"block_tables[{sequence}] has fewer than lengths[{sequence}] / {block_size} "
        "entries",
        BAD_BLOCK: f"block_tables[{sequence}] names a block outside 0 to {num_blocks - 1} before "
        "its length",
    }[status]


def wrong_queries(num_tokens: int, num_queries: int) -> str:
    """That `q` and `query_starts` do not belong together, as one line."""
    return (
        f"q has {num_tokens} tokens, but query_starts ends with {num_queries}: "
        "give as many queries as it says"
    )
