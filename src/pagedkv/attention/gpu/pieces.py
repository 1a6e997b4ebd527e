"""A batch cut into pieces of work for a GPU, once a step, on the host.

A piece is a tile of one sequence's rows (queries, and for each the heads that share a KV head)
over a span of its context; a program computes one piece for one KV head. Long contexts are cut
so that the whole device has something to read: where the work of one piece ends is chosen from
the whole batch, so that a long sequence among short ones is spread like any other work. The parts
of a row that was cut are put together by `combining`, one *entry* a row.

::

    rows of a sequence    [ query 0: heads of a KV head | query 1: ... ]
    cut into tiles        [ first_row ...num_rows ][ ... ]
    context of a tile     [ first ... span ... span ... stop )   each a piece
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pagedkv.attention.work import (
    BAD_BLOCK,
    BAD_LENGTH,
    BAD_STARTS,
    GOOD,
    NARROW_TABLE,
    first_of,
)
from pagedkv.compiling import compiled

TABLE, TOKEN, BEFORE, FIRST_ROW, NUM_ROWS, FIRST, STOP, PLACE = range(8)
"""Columns of a piece: where its sequence's blocks begin in the packed tables; the sequence's first
query among those of the batch; tokens before it; rows; tokens to read, half open; where its part
goes, or -1 where there is but one, which is the result."""
COLUMNS = 8

ENTRY_PLACE, ENTRY_PARTS, ENTRY_STRIDE, ENTRY_TOKEN, ENTRY_EACH = range(5)
"""Columns of an entry: its first part, how many, how far one is from the next; whose row it is:
the query among those of the batch, and the head among those that share a KV head."""
ENTRY_COLUMNS = 5

_STARTING = 64
"""What starting a piece costs, in tokens that could have been read meanwhile."""

_ROUNDS_UNCUT = 8
"""A batch whose mean is so many times its longest context is not cut."""

_DEALT = 4
"""Spans for which the batch is dealt out: some 10 µs each."""


@compiled
def check(
    tables: NDArray[np.int32],
    lengths: NDArray[np.int64],
    starts: NDArray[np.int64],
    num_blocks: int,
    block_size: int,
    window: int,
    chunk: int,
) -> tuple[int, int]:
    """`GOOD` and 0, or what is wrong and with which sequence, as `work.problem` tells it."""
    if len(starts) != len(lengths) + 1 or starts[0] != 0:
        return BAD_STARTS, 0
    for sequence in range(len(lengths)):
        num_queries = starts[sequence + 1] - starts[sequence]
        length = lengths[sequence]
        if num_queries < 0:
            return BAD_STARTS, sequence
        if length < num_queries:
            return BAD_LENGTH, sequence
        if num_queries == 0:
            continue
        if length > tables.shape[1] * block_size:
            return NARROW_TABLE, sequence
        first = first_of(length - num_queries, window, chunk)
        for i in range(first // block_size, (length - 1) // block_size + 1):
            if tables[sequence, i] < 0 or tables[sequence, i] >= num_blocks:
                return BAD_BLOCK, sequence
    return GOOD, 0


@compiled
def num_packed(lengths: NDArray[np.int64], starts: NDArray[np.int64], block_size: int) -> int:
    """Entries of all tables of sequences that ask."""
    count = 0
    for sequence in range(len(lengths)):
        if starts[sequence + 1] > starts[sequence]:
            count += (lengths[sequence] + block_size - 1) // block_size
    return count


@compiled
def pack_tables(
    tables: NDArray[np.int32],
    lengths: NDArray[np.int64],
    starts: NDArray[np.int64],
    block_size: int,
    packed: NDArray[np.int32],
) -> None:
    """The tables of sequences that ask, one after the other and no longer than they need be."""
    count = 0
    for sequence in range(len(lengths)):
        if starts[sequence + 1] > starts[sequence]:
            for i in range((lengths[sequence] + block_size - 1) // block_size):
                packed[count] = tables[sequence, i]
                count += 1


@compiled
def cut(
    lengths: NDArray[np.int64],
    starts: NDArray[np.int64],
    block_size: int,
    num_kv_heads: int,
    heads_each: int,
    window: int,
    chunk: int,
    least_rows: int,
    rows: int,
    tokens: int,
    num_programs: int,
    most_extra: int,
) -> tuple[NDArray[np.int32], NDArray[np.int32], int]:
    """The pieces of sequences with more than `least_rows` rows a KV head and, but for the last
    kind of tile, at most `rows`: (pieces [n, COLUMNS], entries [n, ENTRY_COLUMNS], places).

    `rows` is negative for the last kind, which takes all that have more. `tokens` divides every
    span; `num_programs` run on the device at a time; at most `most_extra` pieces come from
    cutting contexts. The longest pieces come first.
    """
    most_rows = rows if rows > 0 else 1 << 60
    rows = abs(rows)
    num_groups = 0
    for sequence in range(len(lengths)):
        total = (starts[sequence + 1] - starts[sequence]) * heads_each
        if least_rows < total <= most_rows:
            num_groups += (total + rows - 1) // rows
    groups = np.empty((num_groups, COLUMNS), dtype=np.int64)
    count = 0
    table = 0
    for sequence in range(len(lengths)):
        num_queries = starts[sequence + 1] - starts[sequence]
        total = num_queries * heads_each
        if least_rows < total <= most_rows:
            before = lengths[sequence] - num_queries
            for first_row in range(0, total, rows):
                num_rows = min(rows, total - first_row)
                group = groups[count]
                group[TABLE] = table
                group[TOKEN] = starts[sequence]
                group[BEFORE] = before
                group[FIRST_ROW] = first_row
                group[NUM_ROWS] = num_rows
                group[FIRST] = first_of(before + first_row // heads_each, window, chunk)
                group[STOP] = before + (first_row + num_rows - 1) // heads_each + 1
                count += 1
        if num_queries > 0:
            table += (lengths[sequence] + block_size - 1) // block_size
    span = best_span(groups, num_kv_heads, tokens, num_programs, most_extra, rows)

    num_pieces = 0
    num_entries = 0
    for i in range(num_groups):
        num_parts = parts_of(groups[i], tokens, span)
        num_pieces += num_parts
        if num_parts > 1:
            num_entries += groups[i, NUM_ROWS]
    pieces = np.empty((num_pieces, COLUMNS), dtype=np.int32)
    entries = np.empty((num_entries, ENTRY_COLUMNS), dtype=np.int32)
    sizes = np.empty(num_pieces, dtype=np.int64)
    count = 0
    num_entries = 0
    place = 0
    for i in range(num_groups):
        group = groups[i]
        num_parts = parts_of(group, tokens, span)
        num_rows = group[NUM_ROWS]
        if num_parts > 1:
            for row in range(group[FIRST_ROW], group[FIRST_ROW] + num_rows):
                entry = entries[num_entries]
                entry[ENTRY_PLACE] = place + row - group[FIRST_ROW]
                entry[ENTRY_PARTS] = num_parts
                entry[ENTRY_STRIDE] = num_rows
                entry[ENTRY_TOKEN] = group[TOKEN] + row // heads_each
                entry[ENTRY_EACH] = row % heads_each
                num_entries += 1
        begin = group[FIRST] // tokens * tokens
        for part in range(num_parts):
            piece = pieces[count]
            piece[:] = group
            piece[FIRST] = max(group[FIRST], begin + part * span)
            piece[STOP] = min(group[STOP], begin + (part + 1) * span)
            piece[PLACE] = -1
            if num_parts > 1:
                piece[PLACE] = place
                place += num_rows
            sizes[count] = piece[FIRST] - piece[STOP]
            count += 1
    return pieces[np.argsort(sizes, kind="mergesort")], entries, place


@compiled
def parts_of(group: NDArray[np.int64], tokens: int, span: int) -> int:
    """How many pieces a tile's context makes, cut from its first token, down to a tile's edge."""
    size = int(group[STOP] - group[FIRST] // tokens * tokens)
    return max(1, (size + span - 1) // span)


@compiled
def best_span(
    groups: NDArray[np.int64],
    num_kv_heads: int,
    tokens: int,
    num_programs: int,
    most_extra: int,
    rows: int,
) -> int:
    """Tokens of a piece, a multiple of `tokens`, with which the whole batch should end soonest.

    All programs together read at one rate, so a batch takes no less than the mean of what they
    read; nor than the rounds of programs that its full pieces fill. Of the spans for which that is
    least, and of not cutting at all, the batch is dealt out as a device deals it (`end_of`): that
    tells what a few pieces cost that are left over when all others have ended.
    """
    longest = 0
    total = 0
    for i in range(len(groups)):
        size = groups[i, STOP] - groups[i, FIRST] // tokens * tokens
        longest = max(longest, size)
        total += size
    whole = max(tokens, (longest + tokens - 1) // tokens * tokens)
    if longest <= 2 * tokens or most_extra <= 0:
        return whole
    mean = total * num_kv_heads / num_programs
    # What is long is begun first and ends with the rest: an eighth can be lost at most.
    if mean >= _ROUNDS_UNCUT * longest:
        return whole
    # Room for every candidate: their number of cuts grows by a ninth at least.
    spans = np.empty(200, dtype=np.int64)
    costs = np.empty(200, dtype=np.float64)
    count = 0
    num_cuts = 1
    while num_cuts * tokens <= longest:
        span = ((longest + num_cuts - 1) // num_cuts + tokens - 1) // tokens * tokens
        num_cuts = max(num_cuts + 1, num_cuts * 9 // 8)
        if count > 0 and spans[count - 1] == span:
            continue
        num_pieces = 0
        num_full = 0
        is_cut = False
        for i in range(len(groups)):
            parts = parts_of(groups[i], tokens, span)
            num_pieces += parts
            is_cut |= parts > 1
            size = groups[i, STOP] - groups[i, FIRST] // tokens * tokens
            # Two that are more than half full do not fit where a full one does.
            num_full += parts - 1 + int((size - (parts - 1) * span) * 2 > span)
        if num_pieces > len(groups) + most_extra:
            continue
        each = starting_cost(rows, is_cut)
        rounds = (num_full * num_kv_heads + num_programs - 1) // num_programs
        costs[count] = max(
            rounds * (span + each),
            mean + each * num_pieces * num_kv_heads / num_programs,
        )
        if is_cut:
            costs[count] += _STARTING
        spans[count] = span
        count += 1
    order = np.argsort(costs[:count], kind="mergesort")
    best = whole
    least = end_of(groups, num_kv_heads, tokens, num_programs, rows, whole)
    num_dealt = 0
    for i in order:
        if costs[i] >= least or num_dealt == _DEALT:
            break
        if spans[i] == whole:
            continue
        end = end_of(groups, num_kv_heads, tokens, num_programs, rows, spans[i])
        num_dealt += 1
        if end < least:
            least = end
            best = spans[i]
    return best


@compiled
def starting_cost(rows: int, is_cut: bool) -> int:
    """Tokens that could have been read while a piece begins, and a part is written and read again:
    two tokens' worth for each of its rows."""
    return _STARTING + (2 * min(rows, 64) if is_cut else 0)


@compiled
def end_of(
    groups: NDArray[np.int64],
    num_kv_heads: int,
    tokens: int,
    num_programs: int,
    rows: int,
    span: int,
) -> float:
    """When a batch in pieces of `span` ends, in tokens that one program reads until then.

    The longest piece goes first, each to whoever is free first: as many at a time as the device
    has programs for all KV heads of a piece.
    """
    num_pieces = 0
    for i in range(len(groups)):
        num_pieces += parts_of(groups[i], tokens, span)
    sizes = np.empty(num_pieces, dtype=np.int64)
    count = 0
    is_cut = False
    for i in range(len(groups)):
        parts = parts_of(groups[i], tokens, span)
        is_cut |= parts > 1
        each = starting_cost(rows, parts > 1)
        size = groups[i, STOP] - groups[i, FIRST] // tokens * tokens
        for part in range(parts):
            sizes[count] = -(min(span, size - part * span) + each)
            count += 1
    sizes.sort()
    # A heap: of those whose numbers are 2 i + 1 and 2 i + 2, none is free before the i-th.
    free_at = np.zeros(max(1, num_programs // num_kv_heads), dtype=np.int64)
    end = 0
    for i in range(num_pieces):
        done = free_at[0] - sizes[i]
        end = max(end, done)
        place = 0
        while True:
            below = 2 * place + 1
            if below >= len(free_at):
                break
            if below + 1 < len(free_at) and free_at[below + 1] < free_at[below]:
                below += 1
            if free_at[below] >= done:
                break
            free_at[place] = free_at[below]
            place = below
        free_at[place] = done
    return float(end + _STARTING) if is_cut else float(end)
