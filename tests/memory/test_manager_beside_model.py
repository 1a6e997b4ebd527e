"""Random calls to `KVCacheManager`, each beside the model of lists and dictionaries.

After every call all laws hold, the manager knows exactly what the model knows, down to the order
in which blocks will be handed out, and every token reads back from its slot as what was written
there, cached prefixes included. There are two storages: one is written to as soon as there are
slots, at the slots that the call returned; the other only when the tokens are committed, so that
a block which could be found before that would show its garbage.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from models.memory_model import MemoryModel, Refusal
from models.memory_state import assert_unchanged, free_list, row_of, snapshot
from models.siphash import siphash_2_4_128
from models.token_storage import TokenStorage
from pagedkv import KVCacheManager, NeverFits, OutOfBlocks
from pagedkv.errors import InvalidInput, UnknownSequence
from pagedkv.memory.block_key import MAX_TOKEN_ID, TAG_PARENT, TAG_TOKENS, root_key
from pagedkv.memory.blocks import NO_KEY, PENDING, PUBLISHED

NAMESPACES: list[dict[str, Any] | None] = [
    None,
    None,
    {},
    {"salt": "a"},
    {"adapter": "a"},
    {"salt": 1},
    {"salt": "a", "adapter": "a"},
]
Identity = frozenset[tuple[str, Any]]
NO_LIMIT = 10**6
SECRET = bytes(range(16))
some_tokens = st.lists(st.integers(0, 2), min_size=1, max_size=9)


def identity(namespace: dict[str, Any] | None) -> Identity:
    """What two namespaces must have in common to share anything."""
    return frozenset((namespace or {}).items())


@functools.cache
def key_of(
    namespace: frozenset[tuple[str, Any]], tokens: tuple[int, ...], block_size: int
) -> bytes:
    """The key of the last of the full blocks that `tokens` fill."""
    if not tokens:
        secret = np.frombuffer(SECRET, dtype="<u8").astype(np.uint64)
        return root_key(secret, dict(namespace)).tobytes()
    parent = key_of(namespace, tokens[:-block_size], block_size)
    ids = b"".join(token.to_bytes(4, "little") for token in tokens[-block_size:])
    message = (TAG_TOKENS << 56 | len(ids)).to_bytes(8, "little") + ids + bytes(-len(ids) % 8)
    message += (TAG_PARENT << 56 | 16).to_bytes(8, "little") + parent
    return siphash_2_4_128(SECRET, message)


class ManagerBesideModel(RuleBasedStateMachine):
    """Blocks are few and tokens fewer, so that everything collides with everything."""

    @initialize(
        num_blocks=st.integers(1, 12), block_size=st.integers(1, 4), caching=st.integers(0, 7)
    )
    def begin(self, num_blocks: int, block_size: int, caching: int) -> None:
        self.kv = KVCacheManager(num_blocks, block_size, prefix_caching=caching > 0, secret=SECRET)
        self.model = MemoryModel(num_blocks, block_size, caching > 0)
        self.eager = TokenStorage(num_blocks, block_size)
        self.late = TokenStorage(num_blocks, block_size)
        self.prompts: list[tuple[dict[str, Any] | None, list[int]]] = []
        self.freed: list[int] = []

    @rule(
        data=st.data(),
        namespace=st.sampled_from(NAMESPACES),
        tokens=some_tokens,
        max_new_tokens=st.none() | st.integers(1, 6),
    )
    def add(
        self,
        data: st.DataObject,
        namespace: dict[str, Any] | None,
        tokens: list[int],
        max_new_tokens: int | None,
    ) -> None:
        if self.prompts and data.draw(st.booleans(), label="shares a prefix"):
            held = [(dict(s.namespace), s.tokens) for s in self.model.sequences.values()]
            namespace, earlier = data.draw(st.sampled_from(self.prompts + held), label="with")
            tokens = earlier[: data.draw(st.integers(0, len(earlier)), label="of")] + tokens
        self.prompts.append((namespace, tokens))
        before = snapshot(self.kv)
        limit = max_new_tokens or NO_LIMIT
        try:
            number = self.kv.add_sequence(
                tokens, namespace=namespace, max_new_tokens=max_new_tokens
            )
        except OutOfBlocks as refused:
            expected = self.model.add(-1, identity(namespace), tokens, limit)
            assert expected == Refusal(refused.needed, refused.available)
            assert not self.model.never_holds(tokens[:limit])
            assert_unchanged(self.kv, before)
            return
        except NeverFits as refused:
            assert self.model.never_holds(tokens[:limit])
            assert refused.capacity == self.model.num_blocks < refused.needed
            assert_unchanged(self.kv, before)
            return
        assert number not in self.model.sequences and number not in self.freed
        assert self.model.add(number, identity(namespace), tokens, limit) is None
        num_cached = self.model.sequences[number].num_cached
        self.write(self.eager, number, self.kv.slots(number, num_cached), num_cached)

    @precondition(lambda self: self.model.sequences)
    @rule(data=st.data(), as_arrays=st.booleans())
    def extend_by_one(self, data: st.DataObject, as_arrays: bool) -> None:
        numbers = self.choose(data)
        tokens = [data.draw(st.integers(0, 2)) for _ in numbers]
        new_tokens = {number: [token] for number, token in zip(numbers, tokens)}
        if as_arrays:
            self.extend(new_tokens, np.array(numbers), np.array(tokens, dtype=np.uint32))
        else:
            self.extend(new_tokens, numbers, tokens)

    @precondition(lambda self: self.model.sequences)
    @rule(data=st.data())
    def extend_ragged(self, data: st.DataObject) -> None:
        numbers = self.choose(data)
        lists = [data.draw(st.lists(st.integers(0, 2), max_size=6)) for _ in numbers]
        if numbers:
            self.extend(dict(zip(numbers, lists)), numbers, lists)

    def extend(self, new_tokens: dict[int, list[int]], numbers: Any, tokens: Any) -> None:
        before = snapshot(self.kv)
        never = {
            number
            for number, new in new_tokens.items()
            if self.model.never_holds(self.model.sequences[number].tokens + new)
        }
        expected = self.model.extend(new_tokens)
        try:
            step = self.kv.extend(numbers, tokens)
        except OutOfBlocks as refused:
            assert expected == Refusal(refused.needed, refused.available)
            assert not never
            assert_unchanged(self.kv, before)
            return
        except NeverFits as refused:
            assert refused.sequence in never
            assert refused.capacity == self.model.num_blocks < refused.needed
            assert_unchanged(self.kv, before)
            return
        assert not isinstance(expected, Refusal)
        assert step.copies.tolist() == [list(pair) for pair in expected.copies]
        assert step.slots.tolist() == expected.slots
        assert step.query_starts.tolist() == expected.query_starts
        lengths = [len(self.model.sequences[number].tokens) for number in new_tokens]
        assert step.lengths.tolist() == lengths
        tables = [self.model.sequences[number].table for number in new_tokens]
        widest = max((len(table) for table in tables), default=0)
        padded = [table + [-1] * (widest - len(table)) for table in tables]
        assert step.block_tables.tolist() == padded
        assert [array.dtype.name for array in step] == ["int64", "int32", "int64", "int64", "int32"]

        self.eager.copy_pages(step.copies)
        self.late.copy_pages(step.copies)
        for i, number in enumerate(new_tokens):
            slots = step.slots[step.query_starts[i] : step.query_starts[i + 1]]
            self.write(self.eager, number, slots, lengths[i] - len(slots))

    @precondition(lambda self: self.model.sequences)
    @rule(data=st.data(), all_tokens=st.booleans())
    def commit(self, data: st.DataObject, all_tokens: bool) -> None:
        numbers = self.choose(data)
        counts = [len(self.model.sequences[number].tokens) for number in numbers]
        if not all_tokens:
            counts = [
                data.draw(st.integers(self.model.sequences[number].num_computed, count))
                for number, count in zip(numbers, counts)
            ]
        for number, count in zip(numbers, counts):
            done = self.model.sequences[number].num_computed
            self.write(self.late, number, self.kv.slots(number, done, count), done)
        self.kv.commit(numbers, num_computed=None if all_tokens else counts)
        for number, count in zip(numbers, counts):
            self.model.commit(number, count)

    @precondition(lambda self: self.model.sequences)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        number = self.choose_one(data)
        child = self.kv.fork(number)
        assert child not in self.model.sequences and child not in self.freed
        self.model.fork(number, child)

    @precondition(lambda self: self.model.sequences)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        number = self.choose_one(data)
        self.kv.free(number)
        self.model.release(number)
        self.freed.append(number)

    @rule(data=st.data(), unknown=st.sampled_from([-1, 12345, 2**24, 2**40, 2**63, 2**100]))
    def name_an_unknown_sequence(self, data: st.DataObject, unknown: int) -> None:
        if self.freed:
            unknown = data.draw(st.sampled_from([unknown, *self.freed]))
        assume(unknown not in self.model.sequences)
        calls: list[Callable[[], Any]] = [
            lambda: self.kv.free(unknown),
            lambda: self.kv.fork(unknown),
            lambda: self.kv.num_tokens(unknown),
            lambda: self.kv.slots(unknown),
        ]
        if unknown < 2**63:
            known = list(self.model.sequences)
            calls += [
                lambda: self.kv.extend([*known, unknown], [1] * (len(known) + 1)),
                lambda: self.kv.extend([*known, unknown], [[1, 2]] * (len(known) + 1)),
                lambda: self.kv.commit([*known, unknown]),
            ]
        with self.unchanged(), pytest.raises(UnknownSequence) as error:
            data.draw(st.sampled_from(calls))()
        assert error.value.sequence == unknown

    @precondition(lambda self: self.model.sequences)
    @rule(data=st.data())
    def ask_for_what_cannot_be(self, data: st.DataObject) -> None:
        number = self.choose_one(data)
        held = len(self.model.sequences[number].tokens)
        done = self.model.sequences[number].num_computed
        calls: list[Callable[[], Any]] = [
            lambda: self.kv.extend([number, number], [1, 2]),
            lambda: self.kv.extend([number, number], [[1], [2]]),
            lambda: self.kv.extend([number], [-1]),
            lambda: self.kv.extend([number], [[1, MAX_TOKEN_ID + 1]]),
            lambda: self.kv.extend([number], []),
            lambda: self.kv.commit([number, number]),
            lambda: self.kv.commit([number], num_computed=[held + 1]),
            lambda: self.kv.commit([number], num_computed=[done - 1]),
            lambda: self.kv.commit([number], num_computed=[held, held]),
            lambda: self.kv.address(number, held),
            lambda: self.kv.slots(number, held, held + 1),
            lambda: self.kv.add_sequence([]),
            lambda: self.kv.add_sequence([0, -1]),
        ]
        with self.unchanged(), pytest.raises(InvalidInput):
            data.draw(st.sampled_from(calls))()

    @invariant()
    def laws_hold(self) -> None:
        self.kv.verify()

    @invariant()
    def blocks_are_where_the_model_has_them(self) -> None:
        model = self.model
        assert free_list(self.kv) == model.free
        assert self.kv.num_available_blocks == len(model.free)
        for number, sequence in model.sequences.items():
            assert self.kv.block_table(number).tolist() == sequence.table
            assert self.kv.num_tokens(number) == len(sequence.tokens)
            assert self.kv.num_cached_tokens(number) == sequence.num_cached
            row = row_of(number)
            assert self.kv._memory.tables.num_computed[row] == sequence.num_computed
        for block in range(model.num_blocks):
            assert self.kv.ref_count(block) == model.users(block)

    @invariant()
    def blocks_have_the_keys_of_their_content(self) -> None:
        pool = self.kv._memory.pool
        contents = dict(self.model.pending)
        contents.update({block: content for content, block in self.model.published.items()})
        for block in range(self.model.num_blocks):
            if block in contents:
                key = key_of(*contents[block], self.model.block_size)
                assert pool.key[block].tobytes() == key
            waits = block in self.model.pending
            expected = PENDING if waits else PUBLISHED if block in contents else NO_KEY
            assert pool.key_state[block] == expected

    @invariant()
    def statistics_say_what_a_recount_says(self) -> None:
        model, statistics = self.model, self.kv.statistics()
        tables = [sequence.table for sequence in model.sequences.values()]
        assert statistics.used_blocks == len({block for table in tables for block in table})
        assert statistics.cached_blocks == len(model.cached())
        assert statistics.free_blocks == len(model.free) - len(model.cached())
        assert statistics.num_sequences == len(tables)
        assert statistics.table_entries == sum(map(len, tables))
        assert statistics.held_tokens == sum(len(s.tokens) for s in model.sequences.values())
        assert statistics.query_tokens == model.query_tokens
        assert statistics.hit_tokens == model.hit_tokens
        assert statistics.published_blocks == model.num_published
        assert statistics.evicted_blocks == model.num_evicted

    @invariant()
    def every_token_reads_back_as_it_was_written(self) -> None:
        useless = set(range(self.model.num_blocks)) - self.model.readable()
        self.eager.spoil(useless)
        self.late.spoil(useless)
        for number, sequence in self.model.sequences.items():
            slots = self.kv.slots(number)
            self.assert_reads(self.eager, number, slots)
            self.assert_reads(self.late, number, slots[: sequence.num_computed])

    def assert_reads(self, storage: TokenStorage, number: int, slots: Any) -> None:
        sequence = self.model.sequences[number]
        expected = storage.content(sequence.namespace, sequence.tokens, 0, len(slots))
        assert np.array_equal(storage.read(slots), expected)

    def write(self, storage: TokenStorage, number: int, slots: Any, start: int) -> None:
        sequence = self.model.sequences[number]
        stop = start + len(slots)
        storage.write(slots, storage.content(sequence.namespace, sequence.tokens, start, stop))

    def choose(self, data: st.DataObject) -> list[int]:
        known = sorted(self.model.sequences)
        return data.draw(st.lists(st.sampled_from(known), unique=True), label="sequences")

    def choose_one(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.model.sequences)), label="sequence")

    def unchanged(self) -> Any:
        return Unchanged(self.kv)


class Unchanged:
    """What happens inside the `with` leaves every array as it was."""

    def __init__(self, kv: KVCacheManager) -> None:
        self.kv = kv

    def __enter__(self) -> None:
        self.before = snapshot(self.kv)

    def __exit__(self, *error: object) -> None:
        assert_unchanged(self.kv, self.before)


TestManagerBesideModel = ManagerBesideModel.TestCase
TestManagerBesideModel.settings = settings(max_examples=(settings.default.max_examples + 1) // 2)
