"""The memory as plain lists and dictionaries: slow, and obviously right.

A block's key is everything that its content depends on, the namespace and all tokens up to its
end, so nothing is hashed. Users of a block are counted by looking through all tables. What a call
would need is found by doing it to a copy of the whole model that has blocks to spare.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable
from dataclasses import dataclass, field

Key = tuple[Hashable, tuple[int, ...]]
"""A namespace, and the tokens of a sequence from its first to a block's last."""


@dataclass(frozen=True)
class Refusal:
    """What `OutOfBlocks` must say."""

    needed: int
    available: int


@dataclass
class ModelSequence:
    """A sequence's tokens that have slots, and what holds them."""

    namespace: Hashable
    tokens: list[int] = field(default_factory=list)
    table: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_cached: int = 0


@dataclass
class ModelStep:
    """What an `extend` must return."""

    copies: list[tuple[int, int]]
    slots: list[int]
    query_starts: list[int]


@dataclass
class MemoryModel:
    """`free` is the free list from its head; `published` finds a block by its key."""

    num_blocks: int
    block_size: int
    caching: bool = True
    free: list[int] = field(default_factory=list)
    published: dict[Key, int] = field(default_factory=dict)
    pending: dict[int, Key] = field(default_factory=dict)
    sequences: dict[int, ModelSequence] = field(default_factory=dict)
    num_published: int = 0
    num_evicted: int = 0
    query_tokens: int = 0
    hit_tokens: int = 0

    def __post_init__(self) -> None:
        self.free = list(range(self.num_blocks))

    def users(self, block: int) -> int:
        return sum(sequence.table.count(block) for sequence in self.sequences.values())

    def cached(self) -> list[int]:
        """Blocks that are free and can still be hit, in the order in which they go."""
        return [block for block in self.free if block in self.published.values()]

    def readable(self) -> set[int]:
        """Blocks whose content must be kept."""
        held = {block for sequence in self.sequences.values() for block in sequence.table}
        return held | set(self.published.values())

    def never_holds(self, tokens: list[int]) -> bool:
        """Whether a memory that nobody else uses has too few blocks for one such sequence."""
        empty = MemoryModel(self.num_blocks, self.block_size)
        return empty.add(0, None, tokens, len(tokens)) is not None

    def add(
        self, number: int, namespace: Hashable, tokens: list[int], max_new_tokens: int
    ) -> Refusal | None:
        """Begin sequence `number`, or say why not."""
        hits: list[int] = []
        while len(hits) < (len(tokens) - 1) // self.block_size:
            key = (namespace, tuple(tokens[: (len(hits) + 1) * self.block_size]))
            if not self.caching or key not in self.published:
                break
            hits.append(self.published[key])
        num_cached = len(hits) * self.block_size
        held = tokens[: num_cached + max_new_tokens]
        needed = self._blocks_for(len(held)) - len(hits)
        available = len([block for block in self.free if block not in hits])
        if needed > available:
            return Refusal(needed, available)
        for block in hits:
            if block in self.free:
                self.free.remove(block)
        sequence = ModelSequence(namespace, held[:num_cached], hits, num_cached, num_cached)
        self.sequences[number] = sequence
        self._append(sequence, held[num_cached:])
        self.query_tokens += len(tokens)
        self.hit_tokens += num_cached
        return None

    def extend(self, new_tokens: dict[int, list[int]]) -> ModelStep | Refusal:
        """Append tokens to several sequences in this order, or say why not."""
        available = len(self.free)
        trial = copy.deepcopy(self)
        spare = sum(len(tokens) + 1 for tokens in new_tokens.values())
        trial.free += range(self.num_blocks, self.num_blocks + spare)
        trial._extend(new_tokens)
        needed = available + spare - len(trial.free)
        if needed > available:
            return Refusal(needed, available)
        return self._extend(new_tokens)

    def commit(self, number: int, num_computed: int) -> None:
        """The first `num_computed` tokens are in the blocks: their full blocks can be found."""
        sequence = self.sequences[number]
        for i in range(sequence.num_computed // self.block_size, num_computed // self.block_size):
            self._publish(sequence.table[i])
        sequence.num_computed = num_computed

    def fork(self, number: int, child: int) -> None:
        self.sequences[child] = copy.deepcopy(self.sequences[number])

    def release(self, number: int) -> None:
        """The sequence leaves its blocks, the deepest first."""
        table = self.sequences[number].table
        while table:
            self._leave(table.pop())
        del self.sequences[number]

    def _blocks_for(self, num_tokens: int) -> int:
        full, rest = divmod(num_tokens, self.block_size)
        return full + (rest > 0)

    def _extend(self, new_tokens: dict[int, list[int]]) -> ModelStep:
        step = ModelStep([], [], [0])
        for number, tokens in new_tokens.items():
            sequence = self.sequences[number]
            start = len(sequence.tokens)
            if tokens and start % self.block_size and self.users(sequence.table[-1]) > 1:
                shared = sequence.table[-1]
                sequence.table[-1] = self._take()
                step.copies.append((shared, sequence.table[-1]))
            self._append(sequence, tokens)
            step.slots += [self.slot(number, i) for i in range(start, len(sequence.tokens))]
            step.query_starts.append(len(step.slots))
        return step

    def slot(self, number: int, token: int) -> int:
        block = self.sequences[number].table[token // self.block_size]
        return block * self.block_size + token % self.block_size

    def _append(self, sequence: ModelSequence, tokens: list[int]) -> None:
        for token in tokens:
            if len(sequence.tokens) % self.block_size == 0:
                sequence.table.append(self._take())
            sequence.tokens.append(token)
            if self.caching and len(sequence.tokens) % self.block_size == 0:
                self.pending[sequence.table[-1]] = (sequence.namespace, tuple(sequence.tokens))

    def _take(self) -> int:
        block = self.free.pop(0)
        for key, cached in list(self.published.items()):
            if cached == block:
                del self.published[key]
                self.num_evicted += 1
        return block

    def _publish(self, block: int) -> None:
        if block not in self.pending:
            return
        key = self.pending.pop(block)
        if key in self.published:
            twin = self.published[key]
            if twin not in self.free:
                return
            self.free.remove(twin)
            self.free.insert(0, twin)
        self.published[key] = block
        self.num_published += 1

    def _leave(self, block: int) -> None:
        """Its user is gone from the tables already."""
        if self.users(block) == 0:
            self.pending.pop(block, None)
            if block in self.published.values():
                self.free.append(block)
            else:
                self.free.insert(0, block)
