"""The batch of one step, checked and cut into pieces once for all layers that attend with it."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pagedkv.attention import arguments, work
from pagedkv.attention.arrays import aligned, batch_arrays
from pagedkv.errors import InvalidInput

_ALONE = 100_000
"""Multiplications that one thread ends before another has begun."""


class LayerKind(NamedTuple):
    """What the pieces of a batch depend on, besides the batch: layers alike in it share them."""

    num_kv_heads: int
    heads_each: int
    key_dim: int
    value_dim: int
    window: int
    chunk: int


class Cut:
    """A batch in pieces for one kind of layer, with all the room that computing them takes."""

    def __init__(
        self,
        batch: Plan,
        kind: LayerKind,
        pieces: NDArray[np.int64],
        num_parts: int,
        most_rows: int,
        num_threads: int,
    ) -> None:
        self.num_threads = num_threads
        each = arguments.num_scratch(kind.heads_each, most_rows, kind.key_dim, kind.value_dim)
        self.counters = np.zeros(len(pieces) + arguments.FIRST_LEADER, dtype=np.int64)
        self.integers = np.zeros(arguments.NUM_INTEGERS, dtype=np.int64)
        self.integers[arguments.SCRATCH_EACH] = each
        self.integers[arguments.WINDOW] = kind.window
        self.integers[arguments.CHUNK] = kind.chunk
        self.factors = np.zeros(2, dtype=np.float32)
        self.arrays: dict[int, NDArray[Any]] = {
            arguments.TABLES: batch.tables,
            arguments.LENGTHS: batch.lengths,
            arguments.STARTS: batch.starts,
            arguments.PIECES: pieces,
            arguments.COUNTERS: self.counters,
            arguments.PARTS_KEPT: np.empty(num_parts, dtype=np.float32),
            arguments.INTEGERS: self.integers,
            arguments.FACTORS: self.factors,
            arguments.SCRATCH: aligned(num_threads * each, np.float32),
            arguments.ROWS: np.empty(num_threads * arguments.NUM_ROWS_OF_SCRATCH, dtype=np.int64),
        }
        self.numbers = (ctypes.c_int64 * arguments.NUM_NUMBERS)()
        """Address and size of every array, as a task takes them; those of a call are still 0."""
        for place, array in self.arrays.items():
            self.numbers[2 * place], self.numbers[2 * place + 1] = array.ctypes.data, array.size
        self.numbers[arguments.TABLE_WIDTH] = batch.tables.shape[1]


class Plan:
    """Block tables, lengths and query starts of a batch, for any number of layers of a storage.

    Made by `KVStorage.plan`. The arrays given must stay as they are for as long as it is used,
    and one thread at a time may use it.
    """

    def __init__(
        self,
        block_tables: Any,
        lengths: Any,
        query_starts: Any,
        *,
        block_size: int,
        num_blocks: int,
        most_threads: int,
        made_for: object,
    ) -> None:
        """`made_for` is whoever may use it: what is checked here holds for no other storage."""
        self.made_for = made_for
        self.tables, self.lengths, self.starts = batch_arrays(block_tables, lengths, query_starts)
        self._block_size, self._num_blocks = block_size, num_blocks
        self._most_threads = most_threads
        self._cuts: dict[tuple[int, LayerKind], Cut | None] = {}

    def cut(self, num_tokens: int, kind: LayerKind) -> Cut | None:
        """The batch of `num_tokens` queries in pieces; None where there is nothing to compute."""
        if (num_tokens, kind) not in self._cuts:
            self._cuts[num_tokens, kind] = self._cut(num_tokens, kind)
        return self._cuts[num_tokens, kind]

    def _cut(self, num_tokens: int, kind: LayerKind) -> Cut | None:
        if len(self.starts) and self.starts[-1] != num_tokens:
            raise InvalidInput(work.wrong_queries(num_tokens, int(self.starts[-1])))
        status, sequence, pieces, num_parts, num_scores, most_rows = work.cut(
            self.tables,
            self.lengths,
            self.starts,
            self._num_blocks,
            self._block_size,
            kind.num_kv_heads,
            kind.heads_each,
            kind.value_dim,
            kind.window,
            kind.chunk,
            arguments.most_few(kind.heads_each),
        )
        if status != work.GOOD:
            raise InvalidInput(work.problem(status, sequence, self._block_size, self._num_blocks))
        if not len(pieces):
            return None
        num_threads = min(self._most_threads, len(pieces))
        if num_scores * (kind.key_dim + kind.value_dim) < _ALONE:
            num_threads = 1
        return Cut(self, kind, pieces, num_parts, most_rows, num_threads)
