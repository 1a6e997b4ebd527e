"""The exact LRU hit rate at every memory size, from one pass over the accesses.

An LRU memory of `C` blocks holds the `C` blocks accessed last. So an access hits exactly when
fewer than `C` *other* blocks were accessed since the last access to its block: one number for
each access, its stack distance, tells the outcome at every size at once::

    accesses   a  b  c  b  b  a
    distance   -  -  -  1  0  2      b at place 3: only c came in between
    hits with C >=       2  1  3

The distance is counted in a row of marks over time, one at the latest access of each block;
distance = marks later than the block's own. Marks are bits, 32 to an int64 so
that counting them cannot overflow, and a Fenwick
tree over the words counts those up to any time in logarithmic time. Words and tree take half a
byte an access, a sixteenth of the ids themselves, so that the axis of time needs no compaction
however long the trace is.

Source: R. L. Mattson, J. Gecsei, D. R. Slutz and I. L. Traiger, Evaluation techniques for storage
hierarchies, IBM Systems Journal 9(2), 1970; the tree: P. M. Fenwick, A new data structure for
cumulative frequency tables, 1994.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pagedkv.compiling import compiled
from pagedkv.errors import InvalidInput
from pagedkv.simulate.results import HitRateCurve

TARGETS_PERCENT = (50, 80, 95, 100)
"""Shares of the ceiling whose smallest memory a curve names."""

_MAX_POINTS = 2_000


def hit_rate_curve(ids: NDArray[np.int64] | NDArray[np.uint64], *, block_size: int) -> HitRateCurve:
    """The curve of accesses to blocks `ids`, in order of access.

    `ids` int64 [n], one number a block, or uint64 [n, 2], one 128-bit key a block.
    `block_size` tokens is passed on into the record. Raises `InvalidInput` without accesses and
    for another shape or dtype. Cost: see `lru_hits`.
    """
    if block_size < 1:
        raise InvalidInput(f"block_size is {block_size}: it must be at least 1 token")
    if len(ids) == 0:
        raise InvalidInput("no block accesses: there is no hit rate to speak of")
    hits = lru_hits(ids)
    accesses = len(ids)
    most = int(hits[-1])
    smallest = {}
    if most > 0:
        for percent in TARGETS_PERCENT:
            needed = -(-most * percent // 100)  # whole hits, so that no rounding shifts a size
            smallest[percent / 100] = int(np.searchsorted(hits, needed))
    blocks = _thinned(hits)
    return HitRateCurve(
        block_size=block_size,
        accesses=accesses,
        distinct=len(hits) - 1,
        blocks=blocks,
        hit_rate=hits[blocks] / accesses,
        ceiling=most / accesses,
        smallest=smallest,
    )


def lru_hits(ids: NDArray[np.int64] | NDArray[np.uint64]) -> NDArray[np.int64]:
    """How many of the accesses hit at each memory size: int64 [distinct + 1].

    Entry `C` is the number of hits in an LRU memory of `C` blocks that starts empty and takes in
    each block that misses; a memory of more blocks than are `distinct` hits no more often.
    `ids` as for `hit_rate_curve`. Cost: O(log n) an access; memory for the distinct blocks.
    """
    if ids.dtype == np.int64 and ids.ndim == 1:
        names = np.ascontiguousarray(ids, np.int64).reshape(-1, 1)
    elif ids.dtype == np.uint64 and ids.ndim == 2 and ids.shape[1] == 2:
        names = np.ascontiguousarray(ids).view(np.int64)
    else:
        raise InvalidInput(
            f"block ids are int64 [n] or uint64 [n, 2], not {ids.dtype} {list(ids.shape)}"
        )
    return np.cumsum(_hits_by_needed_size(names))


def _thinned(hits: NDArray[np.int64]) -> NDArray[np.int64]:
    """At most `_MAX_POINTS` memory sizes that draw `hits` well: int64 [k], ascending.

    Only sizes at which the count changes, both ends kept. Half of the points are spread evenly
    over the logarithm of the size and half evenly over the hits, so that neither a long flat
    stretch nor a steep one loses its shape on either kind of axis.
    """
    sizes = np.flatnonzero(np.diff(hits)) + 1
    if len(sizes) == 0:
        return np.ones(1, np.int64)
    if len(sizes) > _MAX_POINTS:
        half = _MAX_POINTS // 2
        by_size = np.geomspace(sizes[0], sizes[-1], half)
        by_hits = np.linspace(hits[sizes[0]], hits[-1], half)
        picked = np.concatenate(
            (
                np.searchsorted(sizes, np.floor(by_size)),
                np.searchsorted(hits[sizes], np.floor(by_hits)),  # from the first to the last
            )
        )
        sizes = sizes[np.unique(picked)]
    return sizes


@compiled
def _hits_by_needed_size(names: NDArray[np.int64]) -> NDArray[np.int64]:
    """Histogram of the smallest memory with which each access hits: int64 [distinct + 1].

    `names` int64 [n, w], C-contiguous: row `t` names the block of access `t`. First accesses,
    which hit with no memory whatever, are not counted.
    """
    num_accesses, width = names.shape
    marks = np.zeros((num_accesses >> 5) + 1, np.int64)
    tree = np.zeros(len(marks) + 1, np.int64)
    bits = 10
    while 4 << bits < num_accesses:
        bits += 1
    table = np.zeros((1 << bits, width + 1), np.int64)
    by_size = np.zeros(len(table), np.int64)
    distinct = 0
    last_before = -2
    last_size = 0
    emptied_word = 0  # a word of marks, and how many it lost that the tree still counts
    emptied = 0
    for now in range(num_accesses):
        # The current word enters the tree when it is complete: no earlier access needs it there.
        word = now >> 5
        if now & 31 == 0 and now > 0:
            _add(tree, word - 1, _count_bits(marks[word - 1]))
        row = _find(table, bits, names, now)
        before = table[row, width] - 1
        if before >= 0:
            # After a block whose own last access was the one before, as in a prefix that is used
            # again, the distance is the same: between the two pairs of accesses lie the same
            # blocks, but for this one in the first and its predecessor in the second.
            if before != last_before + 1:
                _add(tree, emptied_word, -emptied)
                emptied = 0
                last_size = distinct - _marks_until(marks, tree, before) + 1
            by_size[last_size] += 1
            marks[before >> 5] ^= 1 << (before & 31)
            if before >> 5 != emptied_word:
                _add(tree, emptied_word, -emptied)
                emptied_word = before >> 5
                emptied = 0
            if emptied_word != word:
                emptied += 1
        else:
            for i in range(width):
                table[row, i] = names[now, i]
            distinct += 1
        table[row, width] = now + 1
        marks[word] |= 1 << (now & 31)
        last_before = before if before >= 0 else -2
        if 5 * distinct > 4 * len(table):
            bits += 1
            table = _moved(table, bits)
            longer = np.zeros(len(table), np.int64)
            for i in range(len(by_size)):
                longer[i] = by_size[i]
            by_size = longer
    return by_size[: distinct + 1].copy()


@compiled
def _marks_until(marks: NDArray[np.int64], tree: NDArray[np.int64], time: int) -> int:
    """Number of marks at times up to and including `time`."""
    word = time >> 5
    count = _count_bits(marks[word] & ((2 << (time & 31)) - 1))
    while word > 0:  # tree[k] counts the words [k - lowest set bit of k, k)
        count += int(tree[word])
        word &= word - 1
    return count


@compiled
def _add(tree: NDArray[np.int64], word: int, change: int) -> None:
    """Change the count of one word of marks."""
    if change == 0:
        return
    node = word + 1
    while node < len(tree):
        tree[node] += change
        node += node & -node


@compiled
def _count_bits(word: int) -> int:
    """Bits set among the lower 32: summed in pairs, fours, bytes, and all bytes in the topmost."""
    pairs = word - ((word >> 1) & 0x55555555)
    fours = (pairs & 0x33333333) + ((pairs >> 2) & 0x33333333)
    octets = (fours + (fours >> 4)) & 0x0F0F0F0F
    return ((octets * 0x01010101) >> 24) & 0xFF


# The table of latest accesses: int64 [2^bits, w + 1], a row a block: its name, and 1 + the time
# of its latest access, 0 where the row is free. Name and time in one row cost one cache miss.


@compiled
def _find(table: NDArray[np.int64], bits: int, names: NDArray[np.int64], at: int) -> int:
    """Row of the block that `names[at]` names, or the free row that it belongs into.

    Names that differ only in the last four bits go into neighbouring rows: ids are often
    numbered in order of first use, and then a prefix is read from memory in one stream.
    """
    width = table.shape[1] - 1
    mixed = 0
    for i in range(width):
        # Multipliers of 31 bits keep the products within an int64.
        mixed ^= ((names[at, i] >> 4) & 0xFFFFFFFF) * (0x5851F42D + 2 * i)
        mixed ^= ((names[at, i] >> 36) & 0x0FFFFFFF) * (0x4C957F2D + 2 * i)
    row = ((mixed & 0xFFFFFFFF) >> (36 - bits)) << 4 | (names[at, 0] & 15)
    while table[row, width] != 0:
        different = 0
        for i in range(width):
            different |= table[row, i] ^ names[at, i]
        if different == 0:
            break
        row = (row + 1) & (len(table) - 1)
    return int(row)


@compiled
def _moved(table: NDArray[np.int64], bits: int) -> NDArray[np.int64]:
    """The same blocks in a table of `2^bits` rows."""
    larger = np.zeros((1 << bits, table.shape[1]), np.int64)
    for row in range(len(table)):
        if table[row, -1] != 0:
            place = _find(larger, bits, table, row)
            for i in range(table.shape[1]):
                larger[place, i] = table[row, i]
    return larger
