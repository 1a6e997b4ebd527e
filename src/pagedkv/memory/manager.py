"""`KVCacheManager`: sequences in, slots out. It checks arguments and calls compiled functions."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pagedkv.errors import BrokenLaw, InvalidInput, NeverFits, OutOfBlocks, UnknownSequence
from pagedkv.memory import (
    address,
    allocation,
    arguments,
    block_key,
    block_table,
    calls,
    extension,
    laws,
)
from pagedkv.memory.block_key import Namespace
from pagedkv.memory.blocks import CACHED, EVICTED, FREE, PUBLICATIONS

Sequences: TypeAlias = Sequence[int] | NDArray[np.int64]
TokenIds: TypeAlias = Sequence[int] | NDArray[np.integer]


class Step(NamedTuple):
    """What one `extend` of n sequences by m new tokens did, as arrays that kernels use as they are.

    - `slots` int64 [m]: where each new token's keys and values go, sequence after sequence;
    - `block_tables` int32 [n, widest]: each sequence's block table, -1 behind its end;
    - `lengths` int64 [n]: tokens of each sequence, the new ones included;
    - `query_starts` int64 [n + 1]: the new tokens of sequence i are
      `slots[query_starts[i]:query_starts[i + 1]]`;
    - `copies` int32 [k, 2]: (from, to) of each block to copy, before anything is written.
    """

    slots: NDArray[np.int64]
    block_tables: NDArray[np.int32]
    lengths: NDArray[np.int64]
    query_starts: NDArray[np.int64]
    copies: NDArray[np.int32]


@dataclass(frozen=True)
class Statistics:
    """What the memory holds now, and what happened since the start."""

    num_blocks: int
    block_size: int
    used_blocks: int
    cached_blocks: int
    free_blocks: int
    num_sequences: int
    table_entries: int
    """Blocks that the sequences would need without sharing."""
    held_tokens: int
    """Tokens that the sequences would hold without sharing."""
    query_tokens: int
    """Tokens of all sequences ever added, which could have been cached."""
    hit_tokens: int
    """Of those, the ones that were."""
    published_blocks: int
    evicted_blocks: int

    @property
    def hit_rate(self) -> float:
        """Share of the tokens added that were cached; 0 before anything was added."""
        return self.hit_tokens / self.query_tokens if self.query_tokens else 0.0


class KVCacheManager:
    """Physical blocks, block tables and cached prefixes of many sequences.

    It says where keys and values go; it does not hold them. Every call either does all that was
    asked or raises and leaves everything as it was.

    >>> kv = KVCacheManager(num_blocks=8, block_size=4)
    >>> a = kv.add_sequence([11, 12, 13, 14, 15, 16])
    >>> kv.address(a, 5)
    Address(logical_block=1, block=1, offset=1, slot=5)
    >>> b = kv.fork(a)
    >>> step = kv.extend([a, b], [17, 18])
    >>> step.copies.tolist(), step.slots.tolist()
    ([[1, 2]], [10, 6])
    >>> kv.free(a), kv.free(b)
    (None, None)

    `num_blocks` physical blocks of `block_size` tokens each. With `prefix_caching`, full blocks
    are found again by their content, after `commit` said that it is there; `secret` (16 bytes)
    keys the hash, random unless given: give one only to share keys between processes.

    Not thread-safe: one thread at a time.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int = 16,
        *,
        prefix_caching: bool = True,
        secret: bytes | None = None,
    ) -> None:
        num_blocks = arguments.as_count("num_blocks", num_blocks, 1, arguments.MAX_BLOCKS)
        block_size = arguments.as_count("block_size", block_size, 1, arguments.MAX_BLOCK_SIZE)
        secret = os.urandom(16) if secret is None else arguments.as_secret(secret)
        self._block_size = block_size
        self._caching = prefix_caching
        self._secret = np.frombuffer(secret, dtype="<u8").astype(np.uint64)
        self._root = block_key.root_key(self._secret, {})
        try:
            self._memory = allocation.make_memory(num_blocks, num_rows=16, width=_stride(16))
        except MemoryError as error:
            raise InvalidInput(f"{num_blocks} blocks take more memory than there is") from error
        self._tails = extension.make_tails(16, block_size)
        self._state = calls.state_of(self._memory, self._tails)
        self._longest = 0  # no sequence has more tokens than this
        self._query_tokens = 0
        self._hit_tokens = 0
        self._num_cached = np.zeros(16, dtype=np.int64)  # by row

    @property
    def num_blocks(self) -> int:
        """All physical blocks."""
        return len(self._memory.pool.ref_count)

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        return self._block_size

    @property
    def num_available_blocks(self) -> int:
        """Blocks that no sequence uses, cached ones included."""
        return int(self._memory.pool.counters[FREE])

    def add_sequence(
        self,
        token_ids: TokenIds,
        *,
        namespace: Namespace | None = None,
        max_new_tokens: int | None = None,
    ) -> int:
        """Begin a sequence with its prompt and return its number.

        The longest cached prefix is shared, never the last token; slots for the rest are taken
        from free blocks. `namespace` names what besides the tokens changes K and V: sequences
        of different namespaces share nothing. With `max_new_tokens` only so many tokens past
        the cached prefix get slots now (chunked prefill); `extend` with the others follows.

        Raises `OutOfBlocks`, which may pass when others leave; `NeverFits` for more tokens than
        all blocks hold; `InvalidInput` for no tokens or an id outside 0 to 2**32 - 1. O(1) a
        block.
        """
        ids = arguments.as_integers("token ids", token_ids)
        if len(ids) == 0:
            raise InvalidInput("a sequence needs at least one token")
        most = len(ids)
        if max_new_tokens is None:
            max_new_tokens = arguments.MAX_TOKENS
        else:
            max_new_tokens = arguments.as_count(
                "max_new_tokens", max_new_tokens, 1, arguments.MAX_TOKENS
            )
            if max_new_tokens < most:  # a part of it may fit where all of it never does
                most = min(most, self.num_blocks * self._block_size)
        root = self._root if namespace is None else block_key.root_key(self._secret, namespace)
        self._make_room(most, rows=1)
        added = calls.add_tokens(
            self._state,
            self._secret,
            root,
            ids,
            max_new_tokens,
            self._block_size,
            self._caching,
        )
        return self._added(added, len(ids), min(len(ids), max_new_tokens))

    def add_keyed_sequence(
        self,
        num_tokens: int,
        block_keys: NDArray[np.uint64],
    ) -> int:
        """Begin a sequence whose blocks are named by keys of the caller's own making.

        `block_keys` uint64 [k, 2], 128 bits for each of the first k full blocks of its
        `num_tokens` tokens; each must cover everything before it too. Blocks that later tokens
        fill get no key. For routers, recorded traffic and engines that hash elsewhere.

        Raises `OutOfBlocks`; `NeverFits` for more tokens than all blocks hold; `InvalidInput` for
        more keys than full blocks. O(1) a block.
        """
        num_tokens = arguments.as_count("num_tokens", num_tokens, 1, arguments.MAX_TOKENS)
        keys = arguments.as_keys(block_keys)
        if keys.ndim != 2 or keys.shape[1] != 2 or len(keys) > num_tokens // self._block_size:
            raise InvalidInput(
                f"block_keys has shape {keys.shape}: give [k, 2] with k at most "
                f"{num_tokens // self._block_size}, the full blocks of {num_tokens} tokens"
            )
        if not self._caching:
            keys = keys[:0]
        self._make_room(num_tokens, rows=1)
        added = calls.add_keyed(self._state, keys, num_tokens, self._block_size)
        return self._added(added, num_tokens, num_tokens)

    def extend(self, sequences: Sequences, token_ids: TokenIds | Sequence[TokenIds]) -> Step:
        """Give each sequence room for its new tokens, all of them or none.

        `token_ids` is one id for each sequence, or one list of ids for each. A shared partial
        block is copied before it is written to: `Step.copies` tells the caller which pages.

        Raises `OutOfBlocks`, which may pass when others leave; `NeverFits` for a sequence that
        would be larger than the whole memory; `UnknownSequence`; `InvalidInput` for a sequence
        named twice or a bad id. O(1) a block; one compiled call.
        """
        named = arguments.as_integers("sequences", sequences)
        if not hasattr(token_ids, "__getitem__") or len(token_ids) != len(named):
            given = len(token_ids) if hasattr(token_ids, "__len__") else repr(token_ids)
            raise InvalidInput(
                f"{len(named)} sequences, but tokens for {given}: give one id, or one list of "
                "ids, for each sequence"
            )
        if len(named) and np.ndim(token_ids[0]):
            return self._extend_ragged(named, token_ids)  # type: ignore[arg-type]
        if self._longest >= self._memory.tables.entries.shape[1] * self._block_size:
            self._longest = int(self._memory.tables.num_tokens.max())  # forget freed sequences
        self._make_room(self._longest + 1, rows=0)
        outcome, arrays = calls.extend_by_one(
            self._state,
            self._secret,
            named,
            arguments.as_integers("token ids", token_ids),  # type: ignore[arg-type]
            self._block_size,
            self._caching,
        )
        if outcome[0] != extension.OK:
            raise self._not_extended(outcome, named, 1)
        self._longest += 1
        return Step(*arrays)

    def commit(self, sequences: Sequences, *, num_computed: Sequences | None = None) -> None:
        """The keys and values of these sequences' tokens are in their blocks now.

        Blocks that this fills can be found by others from now on; until then nobody can hit
        what is not there. `num_computed` says how many tokens of each, all unless given.

        Raises `UnknownSequence`, or `InvalidInput` for a count below the last one or above the
        tokens held; then nothing is published.
        """
        named = arguments.as_integers("sequences", sequences)
        if num_computed is None:
            status, fault = calls.commit_all(self._state, named, self._block_size)
        else:
            counts = arguments.as_integers("num_computed", num_computed)
            if len(counts) != len(named):
                raise InvalidInput(f"{len(named)} sequences, but {len(counts)} counts of tokens")
            status, fault = calls.commit(self._state, named, counts, self._block_size)
            if status == calls.BACKWARDS:
                row = self._row(int(named[fault]))
                raise InvalidInput(
                    f"sequence {named[fault]}: {counts[fault]} tokens computed, but it holds "
                    f"{self._memory.tables.num_tokens[row]} and "
                    f"{self._memory.tables.num_computed[row]} were computed before"
                )
        if status != extension.OK:
            raise _error((status, fault, 0))

    def fork(self, sequence: int) -> int:
        """A new sequence that shares every block of this one, a partial last one included.

        Takes no block: the first to write into the shared partial block gets a copy of it.

        Raises `UnknownSequence`.
        """
        row = self._row(sequence)
        self._make_room(0, rows=1)
        child = int(calls.fork(self._state, row))
        self._num_cached[child % block_table.ROWS] = self._num_cached[row]
        return child

    def free(self, sequence: int) -> None:
        """End a sequence and give back its blocks; cached ones can still be hit.

        Raises `UnknownSequence`, for one that is freed already too.
        """
        row = self._row(sequence)
        try:
            calls.free(self._state, row, self._block_size)
        except BrokenLaw:
            self.verify()  # names the block
            raise

    def num_tokens(self, sequence: int) -> int:
        """Tokens of `sequence` that have a slot."""
        return int(self._memory.tables.num_tokens[self._row(sequence)])

    def num_cached_tokens(self, sequence: int) -> int:
        """Tokens of `sequence` that were served from the cache when it was added."""
        return int(self._num_cached[self._row(sequence)])

    def block_table(self, sequence: int) -> NDArray[np.int32]:
        """A copy of the block table of `sequence`, int32 [ceil(num_tokens / block_size)]."""
        row = self._row(sequence)
        tables = self._memory.tables
        num_blocks = block_table.blocks_for(tables.num_tokens[row], self._block_size)
        return tables.entries[row, :num_blocks].copy()

    def address(self, sequence: int, token: int) -> address.Address:
        """Where the keys and values of one token lie, by its place in the sequence from 0.

        Raises `InvalidInput` for a token that the sequence does not hold.
        """
        row = self._row(sequence)
        token = arguments.as_integer("token", token)
        self._check_tokens(sequence, row, token, token + 1)
        return address.translate(self._memory.tables.entries[row], token, self._block_size)

    def slots(self, sequence: int, start: int = 0, stop: int | None = None) -> NDArray[np.int64]:
        """The slots of tokens `start` to `stop` (half open), of all unless given; int64.

        Raises `InvalidInput` for tokens that the sequence does not hold.
        """
        row = self._row(sequence)
        start = arguments.as_integer("start", start)
        if stop is None:
            stop = int(self._memory.tables.num_tokens[row])
        else:
            stop = arguments.as_integer("stop", stop)
        self._check_tokens(sequence, row, start, stop)
        slots = np.empty(stop - start, dtype=np.int64)
        entries = self._memory.tables.entries
        address.write_slots(entries, row, start, stop, self._block_size, slots, 0)
        return slots

    def ref_count(self, block: int) -> int:
        """Block-table entries that name `block`."""
        block = arguments.as_count("block", block, 0, self.num_blocks - 1)
        return int(self._memory.pool.ref_count[block])

    def statistics(self) -> Statistics:
        """What the memory holds and what happened; a few microseconds, nothing is recounted."""
        pool, tables = self._memory
        num_tokens = tables.num_tokens[tables.num_tokens >= 0]
        free, cached = int(pool.counters[FREE]), int(pool.counters[CACHED])
        return Statistics(
            num_blocks=self.num_blocks,
            block_size=self._block_size,
            used_blocks=self.num_blocks - free,
            cached_blocks=cached,
            free_blocks=free - cached,
            num_sequences=len(num_tokens),
            table_entries=int((-(-num_tokens // self._block_size)).sum()),
            held_tokens=int(num_tokens.sum()),
            query_tokens=self._query_tokens,
            hit_tokens=self._hit_tokens,
            published_blocks=int(pool.counters[PUBLICATIONS]),
            evicted_blocks=int(pool.counters[EVICTED]),
        )

    def verify(self) -> None:
        """Check every law of the memory by recomputing it (docs/laws.md).

        Raises `BrokenLaw`, which lists every broken law by its number.
        """
        broken = laws.broken_laws(self._memory, self._block_size)
        if broken:
            raise BrokenLaw(broken)

    def _extend_ragged(self, named: NDArray[np.int64], token_ids: Sequence[TokenIds]) -> Step:
        parts = [arguments.as_integers("token ids", ids) for ids in token_ids]
        counts = np.array([len(part) for part in parts], dtype=np.int64)
        rows = np.empty(len(named), dtype=np.int64)
        status, fault = calls.find_rows(self._state, named, rows)
        if status != extension.OK:
            raise _error((status, fault, 0))
        most = int((self._memory.tables.num_tokens[rows] + counts).max())
        self._make_room(most, rows=0)
        outcome, arrays = calls.extend(
            self._state,
            self._secret,
            named,
            counts,
            np.concatenate(parts),
            self._block_size,
            self._caching,
        )
        if outcome[0] != extension.OK:
            raise self._not_extended(outcome, named, counts)
        self._longest = max(self._longest, most)
        return Step(*arrays)

    def _not_extended(
        self, outcome: extension.Outcome, named: NDArray[np.int64], counts: NDArray[np.int64] | int
    ) -> Exception:
        if outcome[0] == extension.OUT_OF_BLOCKS:
            num_tokens = self._memory.tables.num_tokens[named % block_table.ROWS] + counts
            longest = int(num_tokens.argmax())
            needed = block_table.blocks_for(int(num_tokens[longest]), self._block_size)
            if needed > self.num_blocks:
                return NeverFits(
                    sequence=int(named[longest]), needed=needed, capacity=self.num_blocks
                )
        return _error(outcome)

    def _added(
        self, added: tuple[extension.Outcome, int, int], num_tokens: int, least_held: int
    ) -> int:
        """The sequence of `num_tokens` that was added, or the error.

        It holds `least_held` of its tokens, or more if some are cached.
        """
        outcome, sequence, num_cached = added
        if outcome[0] == extension.OUT_OF_BLOCKS:
            needed = block_table.blocks_for(least_held, self._block_size)
            if needed > self.num_blocks:
                raise NeverFits(needed=needed, capacity=self.num_blocks)
        if outcome[0] != extension.OK:
            raise _error(outcome)
        self._longest = max(self._longest, num_tokens)
        self._query_tokens += num_tokens
        self._hit_tokens += num_cached
        self._num_cached[sequence % block_table.ROWS] = num_cached
        return int(sequence)

    def _row(self, sequence: int) -> int:
        number = arguments.as_integer("sequence", sequence)
        row, generation = number % block_table.ROWS, number // block_table.ROWS
        tables = self._memory.tables
        if (
            row >= len(tables.num_tokens)
            or tables.num_tokens[row] == block_table.FREE_ROW
            or tables.generation[row] != generation
        ):
            raise UnknownSequence(number)
        return row

    def _check_tokens(self, sequence: int, row: int, start: int, stop: int) -> None:
        held = int(self._memory.tables.num_tokens[row])
        if not 0 <= start <= stop <= held:
            raise InvalidInput(
                f"sequence {sequence} holds tokens 0 to {held} (half open), not {start} to {stop}"
            )

    def _make_room(self, num_tokens: int, *, rows: int) -> None:
        """Enlarge the tables so that `rows` more sequences, and `num_tokens` tokens, have room.

        The tables double, so a token costs O(1) over time. Changes nothing that can be seen. A
        sequence of more blocks than the memory has gets no room: it is refused for lack of blocks
        before its row could be too short.
        """
        tables = self._memory.tables
        num_rows, width = tables.entries.shape
        if num_tokens > width * self._block_size:
            needed = block_table.blocks_for(num_tokens, self._block_size)
            if width < needed <= self.num_blocks:
                width = _stride(max(needed, 2 * width))
        if rows and tables.num_free_rows[0] < rows:
            num_rows *= 2
        if (num_rows, width) != tables.entries.shape:
            tables = block_table.enlarged(tables, num_rows, width)
            self._memory = self._memory._replace(tables=tables)
            self._tails = extension.enlarged_tails(self._tails, num_rows)
            self._num_cached = np.resize(self._num_cached, num_rows)
            self._state = calls.state_of(self._memory, self._tails)


def _stride(width: int) -> int:
    """`width` rounded up to an odd multiple of 16 entries.

    Rows a power of two apart would all compete for the same few cache lines.
    """
    return (-(-width // 16) | 1) * 16


def _error(outcome: extension.Outcome) -> Exception:
    status, first, second = outcome
    if status == extension.OUT_OF_BLOCKS:
        return OutOfBlocks(needed=int(first), available=int(second))
    if status == extension.UNKNOWN:
        return UnknownSequence(int(first))
    if status == extension.TWICE:
        return InvalidInput(f"sequence {first} is named twice: name each once")
    return InvalidInput(f"token id {first} at place {second}: give 0 to {block_key.MAX_TOKEN_ID}")
