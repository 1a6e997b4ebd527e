"""The kernel that attends: one piece of work a program, online softmax in powers of two.

A *row* is one query of one head; the rows of a sequence are its queries, and for each the heads
that share the KV head. A piece is some rows of one sequence over a span of its context (see
`pieces`), for every KV head. One kernel serves decoding, where few rows read a long context, and
prompts, where many rows read it together: they differ in the size of its tiles.

Keys and values are gathered through the block table token by token, so that a tile may be larger
or smaller than a block; within a block the tokens of a head lie together, and so are read as runs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pagedkv.attention.gpu.arithmetic import (
    LOG2_E,
    part_of_kernel,
    product,
    product_added,
    rounded,
    tanh,
)
from pagedkv.attention.gpu.pieces import (
    BEFORE,
    COLUMNS,
    FIRST,
    FIRST_ROW,
    NUM_ROWS,
    PLACE,
    STOP,
    TABLE,
    TOKEN,
)

_COLUMNS = tl.constexpr(COLUMNS)
_TABLE = tl.constexpr(TABLE)
_TOKEN = tl.constexpr(TOKEN)
_BEFORE = tl.constexpr(BEFORE)
_FIRST_ROW = tl.constexpr(FIRST_ROW)
_NUM_ROWS = tl.constexpr(NUM_ROWS)
_FIRST = tl.constexpr(FIRST)
_STOP = tl.constexpr(STOP)
_PLACE = tl.constexpr(PLACE)


@part_of_kernel
def attend_tiles(
    queries,  # [ROWS, KEYS]
    positions,  # [ROWS], of the rows' tokens in their sequence
    firsts,  # [ROWS], the first token that each row sees
    peaks,  # [ROWS], the largest score so far
    totals,  # [ROWS], the sum of the weights so far
    sums,  # [ROWS, VALUES], of the weighted values so far
    keys_at,
    values_at,
    table,
    page_numbers,
    begin,
    end,  # tiles from `begin`, a multiple of TOKENS, up to `end`
    first,
    stop,  # tokens that may be read, half open
    factor,
    soft_cap,
    MASKED: tl.constexpr,
    LOOKS_BACK: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    TOKENS: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The tiles of one span. Without `MASKED`, every row must see all of every tile."""
    key_places = tl.arange(0, KEYS)
    value_places = tl.arange(0, VALUES)
    for start in tl.range(begin, end, TOKENS, num_stages=STAGES):
        tokens = start + tl.arange(0, TOKENS)
        readable = (tokens >= first) & (tokens < stop)
        offsets = tokens % BLOCK_SIZE
        if MASKED:
            blocks = tl.load(table + tokens // BLOCK_SIZE, mask=readable, other=0)
        else:
            blocks = tl.load(table + tokens // BLOCK_SIZE)
        # A block's place is beyond 2**31 numbers in any storage worth a GPU.
        pages = blocks.to(tl.int64) * page_numbers

        # What no query may see may hold anything, NaN too: it must not even be multiplied by 0.
        key_mask = (key_places < KEY_DIM)[None, :]
        if MASKED:
            key_mask = key_mask & readable[:, None]
        rows = keys_at + (pages + offsets * KEY_DIM)[:, None] + key_places[None, :]
        if MASKED or KEY_DIM != KEYS:
            keys = tl.load(rows, mask=key_mask, other=0.0)
        else:
            keys = tl.load(rows)
        scores = product(queries, tl.trans(keys.to(queries.dtype)), PRECISION)
        if SOFT_CAP:
            scores = soft_cap * tanh(scores * factor)
        if MASKED:
            seen = tokens[None, :] <= positions[:, None]
            if LOOKS_BACK:
                seen = seen & (tokens[None, :] >= firsts[:, None])
            scores = tl.where(seen, scores, float("-inf"))

        higher = tl.max(scores, 1)
        if not SOFT_CAP:
            higher = higher * factor
        higher = tl.maximum(peaks, higher)
        shift = higher
        if MASKED:  # a row that has seen nothing yet: -inf less -inf would be NaN
            shift = tl.where(higher == float("-inf"), 0.0, higher)
        if SOFT_CAP:
            weights = tl.exp2(scores - shift[:, None])
        else:
            weights = tl.exp2(scores * factor - shift[:, None])
        shrink = tl.exp2(peaks - shift)
        peaks = higher
        totals = totals * shrink + tl.sum(weights, 1)
        sums = sums * shrink[:, None]

        value_mask = (value_places < VALUE_DIM)[None, :]
        if MASKED:
            value_mask = value_mask & readable[:, None]
        rows = values_at + (pages + offsets * VALUE_DIM)[:, None] + value_places[None, :]
        if MASKED or VALUE_DIM != VALUES:
            values = tl.load(rows, mask=value_mask, other=0.0)
        else:
            values = tl.load(rows)
        narrow = rounded(weights, queries.dtype)
        sums = product_added(narrow, values.to(queries.dtype), sums, PRECISION)
    return peaks, totals, sums


@triton.jit(do_not_specialize=["window", "chunk"])
def attend_pieces(
    out,
    q,
    storage,
    tables,  # int32, the blocks of one sequence after the other
    pieces,  # int32 [n, COLUMNS]
    sinks,
    parts,  # float32 [place, KV head, VALUE_DIM]
    part_scores,  # float32 [place, KV head], logarithms to base 2
    q_token_stride,
    q_head_stride,
    out_token_stride,
    out_head_stride,
    page_numbers,
    key_start,
    value_start,
    factor,
    soft_cap,
    window,
    chunk,
    NUM_HEADS: tl.constexpr,  # KV heads
    HEADS_EACH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEYS: tl.constexpr,  # KEY_DIM, up to a power of two
    VALUES: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    STAGES: tl.constexpr,
    ALL_MASKED: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One piece for one KV head.

    The heads of a piece are next to each other in the grid: they run at the same time, and what
    they read lies in the same pages.
    """
    piece = pieces + tl.program_id(0) // NUM_HEADS * _COLUMNS
    num_rows = tl.load(piece + _NUM_ROWS)
    if num_rows == 0:  # a place kept free in the buffers of a captured graph
        return
    head = tl.program_id(0) % NUM_HEADS
    table = tables + tl.load(piece + _TABLE)
    before = tl.load(piece + _BEFORE)
    first_row = tl.load(piece + _FIRST_ROW)
    first = tl.load(piece + _FIRST)
    stop = tl.load(piece + _STOP)
    place = tl.load(piece + _PLACE)

    row = tl.arange(0, ROWS)
    is_row = row < num_rows
    query = (first_row + row) // HEADS_EACH
    # Between the heads of many tokens lie more than 2**31 numbers.
    query_head = (head * HEADS_EACH + (first_row + row) % HEADS_EACH).to(tl.int64)
    token = (tl.load(piece + _TOKEN) + query).to(tl.int64)
    positions = before + query
    firsts = tl.zeros([ROWS], tl.int32)
    if WINDOW:
        firsts = tl.maximum(firsts, positions - window + 1)
    if CHUNK:
        firsts = tl.maximum(firsts, positions // chunk * chunk)

    key_places = tl.arange(0, KEYS)
    value_places = tl.arange(0, VALUES)
    queries_at = q + token * q_token_stride + query_head * q_head_stride
    queries = tl.load(
        queries_at[:, None] + key_places[None, :],
        mask=is_row[:, None] & (key_places < KEY_DIM)[None, :],
        other=0.0,
    )
    keys_at = storage + (key_start + head * BLOCK_SIZE * KEY_DIM)
    values_at = storage + (value_start + head * BLOCK_SIZE * VALUE_DIM)

    peaks = tl.full([ROWS], float("-inf"), tl.float32)
    totals = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, VALUES], tl.float32)
    begin = first // TOKENS * TOKENS
    # Tiles that some row sees only in part come first, where rows look back only so far, and
    # last, up to the rows' own tokens; between them every row sees everything.
    full_begin = begin
    full_end = begin
    if not ALL_MASKED:
        if WINDOW or CHUNK:
            last_first = tl.max(tl.where(is_row, firsts, 0), 0)
            full_begin = tl.maximum(begin, (last_first + TOKENS - 1) // TOKENS * TOKENS)
            full_begin = tl.minimum(full_begin, (stop + TOKENS - 1) // TOKENS * TOKENS)
        seen_by_all = tl.minimum(before + first_row // HEADS_EACH + 1, stop)
        full_end = tl.maximum(full_begin, seen_by_all // TOKENS * TOKENS)
        if WINDOW or CHUNK:
            peaks, totals, sums = attend_tiles(
                queries, positions, firsts, peaks, totals, sums, keys_at, values_at, table,
                page_numbers, begin, full_begin, first, stop, factor, soft_cap,
                True, True, SOFT_CAP, BLOCK_SIZE, KEY_DIM, VALUE_DIM, KEYS, VALUES, TOKENS,
                STAGES, PRECISION,
            )  # fmt: skip
        peaks, totals, sums = attend_tiles(
            queries, positions, firsts, peaks, totals, sums, keys_at, values_at, table,
            page_numbers, full_begin, full_end, first, stop, factor, soft_cap,
            False, False, SOFT_CAP, BLOCK_SIZE, KEY_DIM, VALUE_DIM, KEYS, VALUES, TOKENS,
            STAGES, PRECISION,
        )  # fmt: skip
    peaks, totals, sums = attend_tiles(
        queries, positions, firsts, peaks, totals, sums, keys_at, values_at, table,
        page_numbers, full_end, stop, first, stop, factor, soft_cap,
        True, WINDOW or CHUNK, SOFT_CAP, BLOCK_SIZE, KEY_DIM, VALUE_DIM, KEYS, VALUES, TOKENS,
        STAGES, PRECISION,
    )  # fmt: skip

    is_value = (value_places < VALUE_DIM)[None, :]
    if place < 0:
        if SINKS:  # one more score, whose value is nothing
            ends = tl.load(sinks + query_head, mask=is_row, other=0.0).to(tl.float32) * LOG2_E
            higher = tl.maximum(peaks, ends)
            shift = tl.where(higher == float("-inf"), 0.0, higher)
            shrink = tl.exp2(peaks - shift)
            totals = totals * shrink + tl.exp2(ends - shift)
            sums = sums * shrink[:, None]
        # Rows that see nothing are padding of a captured graph, and come out as zeros.
        sums = sums / tl.where(totals > 0.0, totals, 1.0)[:, None]
        out_at = out + token * out_token_stride + query_head * out_head_stride
        tl.store(
            out_at[:, None] + value_places[None, :],
            rounded(sums, out.dtype.element_ty),
            mask=is_row[:, None] & is_value,
        )
    else:
        some = tl.where(totals > 0.0, totals, 1.0)
        part = (place + row).to(tl.int64) * NUM_HEADS + head
        tl.store(
            parts + part[:, None] * VALUE_DIM + value_places[None, :],
            sums / some[:, None],
            mask=is_row[:, None] & is_value,
        )
        tl.store(part_scores + part, peaks + tl.log2(some), mask=is_row)
