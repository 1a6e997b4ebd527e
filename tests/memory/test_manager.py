from __future__ import annotations

import inspect
import random
import re
import sys
import tracemalloc
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import pytest

import pagedkv.memory
from models.memory_model import MemoryModel, Refusal
from models.memory_state import assert_unchanged, free_list, snapshot
from pagedkv import KVCacheManager, NeverFits, OutOfBlocks, Step
from pagedkv.errors import InvalidInput
from pagedkv.memory.block_key import MAX_TOKEN_ID
from pagedkv.memory.blocks import NO_KEY

compiled_only = pytest.mark.skipif(
    numba.config.DISABLE_JIT, reason="this is about what compiled code allocates"
)


# Growth: tables that become larger while sequences live in them.


def test_a_sequence_may_outgrow_its_row_by_many_tokens_at_once() -> None:
    kv = KVCacheManager(100, 4)
    a = kv.add_sequence(range(60))
    step = kv.extend([a], [range(340)])
    assert step.lengths.tolist() == [400]
    assert kv.block_table(a).tolist() == list(range(100))
    kv.verify()


def test_a_long_sequence_and_a_long_extension_of_another_fit_beside_each_other() -> None:
    """Together they would be more than the memory, and neither is."""
    kv = KVCacheManager(30, 4)
    a, b = kv.add_sequence(range(60)), kv.add_sequence([1])
    step = kv.extend([a, b], [range(8), range(40)])
    assert step.lengths.tolist() == [68, 41]
    assert step.block_tables.shape == (2, 17)
    kv.verify()


def test_a_part_of_a_prompt_that_is_longer_than_the_memory_gets_its_slots() -> None:
    kv = KVCacheManager(100, 4)
    a = kv.add_sequence(range(1000), max_new_tokens=400)
    assert kv.num_tokens(a) == 400
    assert kv.block_table(a).tolist() == list(range(100))
    kv.verify()
    with pytest.raises(NeverFits):
        kv.extend([a], [400])


@pytest.mark.parametrize("num_tokens", [401, 10**5])
def test_a_prompt_that_never_fits_makes_no_table_larger(num_tokens: int) -> None:
    kv = KVCacheManager(100, 4)
    before = snapshot(kv)
    with pytest.raises(NeverFits) as refused:
        kv.add_sequence(np.arange(num_tokens))
    assert (refused.value.needed, refused.value.capacity) == (-(-num_tokens // 4), 100)
    with pytest.raises(NeverFits):
        kv.add_keyed_sequence(10**15, np.zeros((0, 2), dtype=np.uint64))
    assert kv._memory.tables.entries.shape == before["tables.entries"].shape
    assert_unchanged(kv, before)


def test_one_token_at_a_time_fills_the_whole_memory_and_then_is_refused() -> None:
    kv = KVCacheManager(100, 2)
    other, a = kv.add_sequence(range(100)), kv.add_sequence([0])
    kv.free(other)
    for token in range(1, 200):
        step = kv.extend([a], [token])
        assert step.lengths.tolist() == [token + 1]
        assert step.block_tables.tolist() == [kv.block_table(a).tolist()]
        assert len(kv.block_table(a)) == token // 2 + 1
    kv.verify()
    before = snapshot(kv)
    with pytest.raises(NeverFits) as refused:
        kv.extend([a], [200])
    assert (refused.value.needed, refused.value.capacity) == (101, 100)
    assert_unchanged(kv, before)


Refused = Callable[[KVCacheManager, int, int], Any]
NEVER_FITS: list[tuple[Refused, str]] = [
    (lambda kv, a, b: kv.add_sequence(range(33)), "the sequence needs 9 blocks, the whole"),
    (lambda kv, a, b: kv.add_sequence(range(99), max_new_tokens=33), "the sequence needs 9"),
    (lambda kv, a, b: kv.add_keyed_sequence(33, []), "the sequence needs 9 blocks"),
    (lambda kv, a, b: kv.extend([a, b], [range(2), range(20)]), "sequence 1 needs 9 blocks"),
]
MAY_FIT_LATER: list[Refused] = [
    lambda kv, a, b: kv.add_sequence(range(100, 132)),
    lambda kv, a, b: kv.add_sequence(range(100, 199), max_new_tokens=32),
    lambda kv, a, b: kv.add_keyed_sequence(32, []),
    lambda kv, a, b: kv.extend([a, b], [range(28), range(19)]),  # each alone
]


@pytest.mark.parametrize(("call", "says"), NEVER_FITS)
def test_what_the_whole_memory_could_not_hold_is_told_from_what_must_wait(
    call: Refused, says: str
) -> None:
    kv = KVCacheManager(8, 4)
    a, b = kv.add_sequence(range(4)), kv.add_sequence(range(20, 33))
    before = snapshot(kv)
    with pytest.raises(NeverFits, match=says) as refused:
        call(kv, a, b)
    assert (refused.value.needed, refused.value.capacity) == (9, 8)
    assert_unchanged(kv, before)


@pytest.mark.parametrize("call", MAY_FIT_LATER)
def test_what_fits_when_others_have_left_is_only_out_of_blocks(call: Refused) -> None:
    kv = KVCacheManager(8, 4)
    a, b = kv.add_sequence(range(4)), kv.add_sequence(range(20, 33))
    with pytest.raises(OutOfBlocks):
        call(kv, a, b)


def test_a_cached_prefix_that_leaves_too_little_room_is_not_in_the_way_for_ever() -> None:
    """Without its hits the same call asks for less."""
    kv = KVCacheManager(8, 4)
    a = kv.add_sequence(range(16))
    kv.commit([a])
    with pytest.raises(OutOfBlocks):
        kv.add_sequence(range(99), max_new_tokens=20)
    kv.free(a)
    for _ in range(2):
        kv.free(kv.add_sequence(range(100, 132)))
    assert kv.num_tokens(kv.add_sequence(range(99), max_new_tokens=20)) == 20


@pytest.mark.parametrize("by", ["its prompt", "one extension", "one after another", "its parent"])
def test_one_token_more_than_a_row_holds_fits_however_the_row_was_filled(by: str) -> None:
    kv = KVCacheManager(100, 4)
    held = kv._memory.tables.entries.shape[1] * 4
    if by == "its prompt":
        a = kv.add_sequence(range(held))
    else:
        a = kv.add_sequence([0])
        if by == "one after another":
            for token in range(1, held):
                kv.extend([a], [token])
        else:
            kv.extend([a], [range(1, held)])
    if by == "its parent":
        a = kv.fork(a)
    assert kv._memory.tables.entries.shape[1] * 4 == held
    step = kv.extend([a], [1])
    assert step.lengths.tolist() == [held + 1]
    assert step.slots.tolist() == [held]
    kv.verify()


def test_short_sequences_make_no_table_larger_however_many_come_and_go() -> None:
    kv = KVCacheManager(1000, 1)
    shape = kv._memory.tables.entries.shape
    for _ in range(20):
        a = kv.add_sequence([0])
        for token in range(1, 10):
            kv.extend([a], [token])
        kv.free(a)
    assert kv._memory.tables.entries.shape == shape


def test_many_sequences_keep_their_numbers_and_their_blocks_while_tables_grow() -> None:
    kv = KVCacheManager(500, 4, secret=bytes(16))
    model = MemoryModel(500, 4)
    for i in range(100):
        prompt = [i, i, i, i, i]
        a = kv.add_sequence(prompt)
        model.add(a, None, prompt, 10**6)
        b = kv.fork(a)
        model.fork(a, b)
        if i % 3 == 0:
            kv.free(a)
            model.release(a)
    numbers = list(model.sequences)
    kv.verify()
    assert kv.statistics().num_sequences == len(numbers) == len(set(numbers)) == 166
    kv.extend(numbers, [[7] * 4] * len(numbers))
    model.extend({number: [7] * 4 for number in numbers})
    kv.commit(numbers)
    for number in numbers:
        model.commit(number, 9)
        assert kv.block_table(number).tolist() == model.sequences[number].table
        assert kv.num_tokens(number) == 9
    assert free_list(kv) == model.free
    kv.verify()


@pytest.mark.parametrize("seed", range(3))
def test_long_sequences_of_many_blocks_beside_the_model(seed: int) -> None:
    """Runs of blocks much longer than the machine's, evicted and found again in bulk."""
    choose = random.Random(seed)
    kv, model = KVCacheManager(150, 2, secret=bytes(16)), MemoryModel(150, 2)
    prompts = [[choose.randrange(9) for _ in range(190)] for _ in range(3)]
    for _ in range(60):
        shared = choose.choice(prompts)[: choose.randrange(1, 190)]
        prompt = [*shared, choose.randrange(9)]
        if len(model.sequences) > 3:
            number = choose.choice(list(model.sequences))
            kv.free(number)
            model.release(number)
        try:
            number = kv.add_sequence(prompt)
        except OutOfBlocks as refused:
            expected = model.add(-1, None, prompt, 10**6)
            assert expected == Refusal(refused.needed, refused.available)
            continue
        assert model.add(number, None, prompt, 10**6) is None
        if choose.random() < 0.8:
            kv.commit([number])
            model.commit(number, len(prompt))
        assert kv.num_cached_tokens(number) == model.sequences[number].num_cached
        assert kv.block_table(number).tolist() == model.sequences[number].table
        assert free_list(kv) == model.free
        kv.verify()
    assert kv.statistics().hit_tokens > 1000
    assert kv.statistics().evicted_blocks == model.num_evicted > 100


# Sharing and writing.


def test_of_three_that_write_into_one_shared_block_the_last_needs_no_copy() -> None:
    kv = KVCacheManager(4, 4)
    a = kv.add_sequence([1, 2])
    b, c = kv.fork(a), kv.fork(a)
    step = kv.extend([b, a, c], [3, 4, 5])
    assert step.copies.tolist() == [[0, 1], [0, 2]]
    assert step.slots.tolist() == [6, 10, 2]
    assert kv.num_available_blocks == 1
    kv.verify()


def test_writers_of_a_shared_block_are_counted_exactly() -> None:
    kv = KVCacheManager(3, 4)
    a = kv.add_sequence([1, 2])
    b, c, d = kv.fork(a), kv.fork(a), kv.fork(a)
    before = snapshot(kv)
    with pytest.raises(OutOfBlocks) as refused:
        kv.extend([a, b, c, d], [1, 2, 3, 4])
    assert (refused.value.needed, refused.value.available) == (3, 2)
    assert_unchanged(kv, before)
    kv.free(d)
    assert len(kv.extend([a, b, c], [1, 2, 3]).copies) == 2


def test_a_sequence_that_gets_no_tokens_copies_nothing() -> None:
    kv = KVCacheManager(4, 4)
    a = kv.add_sequence([1, 2])
    b = kv.fork(a)
    step = kv.extend([a, b], [[], [3]])
    assert step.copies.tolist() == [[0, 1]]
    assert step.query_starts.tolist() == [0, 0, 1]
    assert step.lengths.tolist() == [2, 3]
    kv.verify()


def test_a_full_block_is_shared_without_ever_being_copied() -> None:
    kv = KVCacheManager(4, 4)
    a = kv.add_sequence([1, 2, 3, 4])
    b = kv.fork(a)
    step = kv.extend([a, b], [5, 6])
    assert step.copies.tolist() == []
    assert step.block_tables.tolist() == [[0, 1], [0, 2]]


def test_a_fork_knows_how_many_of_its_tokens_were_cached() -> None:
    kv = KVCacheManager(8, 2)
    a = kv.add_sequence(range(6))
    kv.commit([a])
    b = kv.add_sequence(range(6))
    assert kv.num_cached_tokens(kv.fork(b)) == 4


def test_nothing_to_extend_is_an_empty_step() -> None:
    kv = KVCacheManager(4, 4)
    step = kv.extend([], [])
    assert [len(array) for array in step] == [0, 0, 0, 1, 0]
    kv.commit([])
    a = kv.add_sequence([1])
    assert kv.extend([a], [[]]).block_tables.tolist() == [[0]]


def test_help_tells_what_each_array_of_a_step_is() -> None:
    for field in Step._fields:
        assert re.search(rf"`{field}` int(32|64) \[", Step.__doc__ or ""), field


def test_a_step_is_arrays_that_kernels_use_as_they_are() -> None:
    kv = KVCacheManager(8, 4)
    a = kv.add_sequence([1, 2])
    for step in (kv.extend([a, kv.fork(a)], [1, 2]), kv.extend([a], [[3, 4, 5]])):
        assert all(array.flags.c_contiguous and array.flags.writeable for array in step)
        assert all(array.flags.aligned for array in step)


# Prefixes.


def test_without_prefix_caching_nothing_is_ever_found_and_no_key_is_kept() -> None:
    kv = KVCacheManager(8, 2, prefix_caching=False)
    for _ in range(2):
        a = kv.add_sequence(range(6))
        kv.extend([a], [[6, 7]])
        kv.commit([a])
        assert kv.num_cached_tokens(a) == 0
        kv.free(a)
    keys = np.arange(4, dtype=np.uint64).reshape(2, 2)
    kv.commit([kv.add_keyed_sequence(5, keys)])
    assert kv.num_cached_tokens(kv.add_keyed_sequence(5, keys)) == 0
    assert (kv._memory.pool.key_state == NO_KEY).all()


def test_what_was_generated_is_found_by_a_prompt_that_holds_it() -> None:
    kv = KVCacheManager(16, 4)
    a = kv.add_sequence([0, 1, 2])
    for token in range(3, 12):
        kv.extend([a], [token])
    kv.extend([a], [list(range(12, 21))])
    kv.commit([a])
    assert kv.num_cached_tokens(kv.add_sequence(range(30))) == 20


def test_what_was_generated_is_not_found_before_its_commit() -> None:
    kv = KVCacheManager(16, 4)
    a = kv.add_sequence([0, 1, 2])
    kv.extend([a], [[3, 4, 5, 6, 7]])
    assert kv.num_cached_tokens(kv.add_sequence(range(9))) == 0


def test_what_each_branch_of_a_fork_generates_is_found() -> None:
    kv = KVCacheManager(16, 4)
    a = kv.add_sequence(range(6))
    kv.commit([a])
    b = kv.fork(a)
    with pytest.raises(InvalidInput, match="and 6 were computed before"):
        kv.commit([b], num_computed=[5])
    kv.extend([a, b], [[6, 7], [60, 70]])
    kv.commit([a, b])
    assert kv.num_cached_tokens(kv.add_sequence([*range(6), 6, 7, 8])) == 8
    assert kv.num_cached_tokens(kv.add_sequence([*range(6), 60, 70, 8])) == 8
    assert kv.num_cached_tokens(kv.add_sequence([*range(6), 6, 70, 8])) == 4


def test_a_commit_of_a_part_publishes_that_part() -> None:
    kv = KVCacheManager(16, 4)
    a = kv.add_sequence(range(12))
    kv.commit([a], num_computed=[7])
    assert kv.num_cached_tokens(kv.add_sequence(range(12))) == 4
    kv.commit([a], num_computed=[8])
    assert kv.num_cached_tokens(kv.add_sequence(range(12))) == 8


def test_a_sequence_freed_before_its_commit_publishes_nothing() -> None:
    kv = KVCacheManager(16, 4)
    kv.free(kv.add_sequence(range(12)))
    assert kv.num_cached_tokens(kv.add_sequence(range(12))) == 0
    assert kv.statistics().published_blocks == 0


def test_keys_of_the_callers_own_are_found_by_the_caller() -> None:
    kv = KVCacheManager(16, 4)
    keys = np.array([[1, 2], [2**64 - 1, 0], [5, 6]], dtype=np.uint64)
    a = kv.add_keyed_sequence(13, keys)
    kv.extend([a], [[1, 2, 3]])  # fills a block, which has no key
    kv.commit([a])
    assert kv.statistics().published_blocks == 3
    assert kv.num_cached_tokens(kv.add_keyed_sequence(12, keys)) == 8
    assert kv.num_cached_tokens(kv.add_keyed_sequence(13, keys)) == 12
    assert kv.num_cached_tokens(kv.add_keyed_sequence(13, keys + np.uint64(7))) == 0
    assert kv.num_cached_tokens(kv.add_keyed_sequence(16, [])) == 0
    kv.verify()


def test_statistics_tell_the_share_of_tokens_that_were_cached() -> None:
    kv = KVCacheManager(16, 4)
    assert kv.statistics().hit_rate == 0
    a = kv.add_sequence(range(10))
    kv.commit([a])
    kv.add_sequence(range(10))
    assert kv.statistics().hit_rate == 8 / 20


# What cannot be.


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: KVCacheManager(0), "num_blocks is 0: give 1 to"),
        (lambda: KVCacheManager(2**31), "num_blocks is 2147483648: give 1 to"),
        (lambda: KVCacheManager(1.0), "num_blocks is 1.0: give an integer"),
        (lambda: KVCacheManager(True), "num_blocks is True: give an integer"),
        (lambda: KVCacheManager(4, 0), "block_size is 0: give 1 to"),
        (lambda: KVCacheManager(4, "16"), "block_size is '16': give an integer"),
        (lambda: KVCacheManager(4, secret=b"short"), "secret is 5 bytes: give 16 bytes"),
        (lambda: KVCacheManager(4, secret="x" * 16), "secret is str: give 16 bytes"),
    ],
)
def test_a_manager_that_cannot_be_is_refused_in_a_line(
    make: Callable[[], KVCacheManager], says: str
) -> None:
    with pytest.raises(InvalidInput, match=says) as error:
        make()
    assert "\n" not in str(error.value)


Call = Callable[[KVCacheManager, int], Any]
KEYS = np.zeros((2, 2), dtype=np.uint64)
BAD_CALLS: list[tuple[Call, str]] = [
    (lambda kv, a: kv.add_sequence([]), "at least one token"),
    (lambda kv, a: kv.add_sequence([1, -2]), "token id -2 at place 1: give 0 to 4294967295"),
    (lambda kv, a: kv.add_sequence([MAX_TOKEN_ID + 1]), "token id 4294967296 at place 0"),
    (lambda kv, a: kv.add_sequence([2**63]), "token ids go up to 9223372036854775808"),
    (lambda kv, a: kv.add_sequence([2**70]), "token ids are object: give integers"),
    (lambda kv, a: kv.add_sequence([1.0]), "token ids are float64: give integers"),
    (lambda kv, a: kv.add_sequence(["a"]), "token ids are <U1: give integers"),
    (lambda kv, a: kv.add_sequence([True]), "token ids are bool: give integers"),
    (lambda kv, a: kv.add_sequence([[1]]), r"token ids have shape \(1, 1\): give one dimension"),
    (lambda kv, a: kv.add_sequence(5), r"token ids have shape \(\): give one dimension"),
    (lambda kv, a: kv.add_sequence([1, [2]]), "token ids are not all integers"),
    (lambda kv, a: kv.extend([a], [[1, [2]]]), "token ids are not all integers"),
    (lambda kv, a: kv.add_sequence([1], max_new_tokens=0), "max_new_tokens is 0: give 1 to"),
    (lambda kv, a: kv.add_sequence([1], max_new_tokens=1.5), "max_new_tokens is 1.5: give an int"),
    (lambda kv, a: kv.add_keyed_sequence(0, KEYS), "num_tokens is 0: give 1 to"),
    (lambda kv, a: kv.add_keyed_sequence(2**70, KEYS), "num_tokens is 1180591620717411303424"),
    (
        lambda kv, a: kv.add_keyed_sequence(7, KEYS),
        r"shape \(2, 2\): give \[k, 2\] with k at most 1",
    ),
    (lambda kv, a: kv.add_keyed_sequence(9, KEYS[0]), r"shape \(2,\): give \[k, 2\]"),
    (lambda kv, a: kv.add_keyed_sequence(9, KEYS[:, :1]), r"shape \(2, 1\): give \[k, 2\]"),
    (lambda kv, a: kv.add_keyed_sequence(9, [[1, -1]]), "block_keys hold -1: give uint64"),
    (lambda kv, a: kv.add_keyed_sequence(9, [[1.5, 1]]), "block_keys are float64: give uint64"),
    (lambda kv, a: kv.extend([a], [1, 2]), "1 sequences, but tokens for 2"),
    (lambda kv, a: kv.extend([a, a], [1, 2]), "sequence 0 is named twice"),
    (lambda kv, a: kv.extend([a, a], [[1], [2]]), "sequence 0 is named twice"),
    (lambda kv, a: kv.extend([a], [-1]), "token id -1 at place 0"),
    (lambda kv, a: kv.extend([a], [[1, -1]]), "token id -1 at place 1"),
    (lambda kv, a: kv.extend([a], [None]), "token ids are object: give integers"),
    (lambda kv, a: kv.extend([float(a)], [1]), "sequences are float64: give integers"),
    (lambda kv, a: kv.extend([str(a)], [1]), "sequences are <U1: give integers"),
    (lambda kv, a: kv.extend([[a]], [1]), r"sequences have shape \(1, 1\)"),
    (lambda kv, a: kv.commit([a, a]), "sequence 0 is named twice"),
    (lambda kv, a: kv.commit([float(a)]), "sequences are float64: give integers"),
    (lambda kv, a: kv.commit([[a]]), r"sequences have shape \(1, 1\)"),
    (lambda kv, a: kv.commit([a], num_computed=[1.5]), "num_computed are float64: give integers"),
    (lambda kv, a: kv.commit([a], num_computed=[1, 2]), "1 sequences, but 2 counts of tokens"),
    (
        lambda kv, a: kv.commit([a], num_computed=[7]),
        "sequence 0: 7 tokens computed, but it holds 6",
    ),
    (lambda kv, a: kv.commit([a], num_computed=[1]), "and 2 were computed before"),
    (lambda kv, a: kv.num_tokens(0.0), "sequence is 0.0: give an integer"),
    (lambda kv, a: kv.num_tokens(True), "sequence is True: give an integer"),
    (lambda kv, a: kv.num_tokens(np.True_), "sequence is .*True.*: give an integer"),
    (lambda kv, a: kv.address(a, True), "token is True: give an integer"),
    (lambda kv, a: kv.extend([True], [1]), "sequences are bool: give integers"),
    (lambda kv, a: kv.free(None), "sequence is None: give an integer"),
    (lambda kv, a: kv.fork("0"), "sequence is '0': give an integer"),
    (lambda kv, a: kv.address(a, 1.5), "token is 1.5: give an integer"),
    (lambda kv, a: kv.slots(a, 0.5), "start is 0.5: give an integer"),
    (lambda kv, a: kv.slots(a, 0, 0.5), "stop is 0.5: give an integer"),
    (lambda kv, a: kv.ref_count(8), "block is 8: give 0 to 7"),
    (lambda kv, a: kv.ref_count(-1), "block is -1: give 0 to 7"),
]


@pytest.mark.parametrize(("call", "says"), BAD_CALLS, ids=[says for _, says in BAD_CALLS])
def test_bad_input_is_refused_in_a_line_and_changes_nothing(call: Call, says: str) -> None:
    kv = KVCacheManager(8, 4)
    a = kv.add_sequence(range(6))
    kv.commit([a], num_computed=[2])
    before = snapshot(kv)
    with pytest.raises(InvalidInput, match=says) as error:
        call(kv, a)
    assert "\n" not in str(error.value)
    assert_unchanged(kv, before)


INTEGERS = ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", ">i8"]


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers_of_every_type_are_numbers_of_sequences_and_tokens(dtype: str) -> None:
    kv = KVCacheManager(8, 4, secret=bytes(16))
    kv.free(kv.add_sequence([9]))
    kv.add_sequence([9])
    a = kv.add_sequence(np.arange(5, dtype=dtype))
    one = np.dtype(dtype).type(a)
    assert kv.num_tokens(one) == 5
    kv.extend(np.array([a], dtype=dtype), np.array([5], dtype=dtype))
    kv.extend([one], [np.arange(6, 9, dtype=dtype)])
    kv.commit([one], num_computed=np.array([8], dtype=dtype))
    assert kv.address(one, one) == kv.address(a, a)
    assert type(kv.address(one, one).slot) is int
    assert kv.slots(one, one, np.dtype(dtype).type(4)).tolist() == kv.slots(a, a, 4).tolist()
    b = kv.add_sequence(list(range(9)), max_new_tokens=one)
    assert kv.num_cached_tokens(b) == 8
    kv.free(one)
    kv.verify()


def signatures() -> dict[str, int]:
    """For how many kinds of arguments each function of the memory is compiled."""
    return {
        f"{module.__name__}.{name}": len(function.signatures)
        for _, module in inspect.getmembers(pagedkv.memory, inspect.ismodule)
        for name, function in vars(module).items()
        if hasattr(function, "signatures")
    }


@compiled_only
def test_no_kind_of_argument_is_compiled_for_anew() -> None:
    kv = KVCacheManager(64, 4)
    a = kv.add_sequence(np.arange(5))
    kv.extend([a], [1])
    kv.extend([a], [[1]])
    kv.slots(a)
    kv.free(kv.fork(a))
    kv.commit([a])
    before = signatures()
    fixed = np.arange(8)
    fixed.flags.writeable = False
    for tokens in (fixed, fixed[::2], fixed.astype(np.uint16), range(3), (1, 2), fixed[::-1]):
        sequence = kv.add_sequence(tokens, max_new_tokens=np.int32(3))
        kv.extend(np.array([sequence], dtype=np.int32)[::-1], [tokens])
        kv.extend([np.uint64(sequence)], tokens[:1])
        kv.slots(np.int32(sequence), np.uint8(1))
        kv.free(np.int32(sequence))
    assert signatures() == before


# Memory.


def num_python_objects(call: Callable[[], Any]) -> int:
    """Python's own allocations that are alive when `call` is done, its result included."""
    tracemalloc.start()
    try:
        kept = call()
        traces = tracemalloc.take_snapshot()
    finally:
        tracemalloc.stop()
    python_only = traces.filter_traces([tracemalloc.DomainFilter(inclusive=True, domain=0)])
    del kept
    return sum(statistic.count for statistic in python_only.statistics("filename"))


def peak_bytes(call: Callable[[], Any]) -> int:
    """The most that Python had allocated at a time while `call` ran, NumPy's arrays included."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def work(kv: KVCacheManager, n: int) -> list[tuple[Callable[[], Any], int]]:
    """Calls that each touch `n` blocks of 4 tokens or more, and the bytes of arrays each makes.

    The last leaves the memory as the first found it.
    """
    tokens = np.arange(4 * n)
    alive: list[int] = []
    keys_and_hits = 16 * n + 4 * n
    table = 4 * 2 * n  # of 8 * n tokens
    return [
        (lambda: alive.append(kv.add_sequence(tokens)), keys_and_hits),
        (lambda: kv.extend(alive, [tokens]), 8 * 4 * n + 8 * 4 * n + table),  # tokens and slots
        (lambda: kv.extend(alive, tokens[:1]), table),
        (lambda: kv.commit(alive), 0),
        (lambda: alive.append(kv.fork(alive[0])), 0),
        (lambda: alive.append(kv.add_sequence(tokens)), keys_and_hits),
        (lambda: kv.extend(alive, tokens[:3]), 3 * table),
        (lambda: kv.statistics(), 0),
        (lambda: [kv.free(alive.pop()) for _ in range(3)], 0),
    ]


@compiled_only
def test_no_python_object_is_made_for_a_block_or_a_token() -> None:
    kv = KVCacheManager(10_000, 4)
    for call, _ in work(kv, 2000):  # compile, and widen the tables
        call()
    objects_few = [num_python_objects(call) for call, _ in work(kv, 4)]
    objects_many = [num_python_objects(call) for call, _ in work(kv, 2000)]
    assert objects_many == pytest.approx(objects_few, abs=20)
    kv.verify()


@compiled_only
def test_calls_need_no_memory_for_a_block_or_a_token_but_their_arrays() -> None:
    """In passing neither: a list of a number for each block would be 72,000 bytes."""
    kv = KVCacheManager(10_000, 4)
    for call, _ in work(kv, 2000):
        call()
    beside_arrays = [
        [peak_bytes(call) - array_bytes for call, array_bytes in work(kv, n)] for n in (4, 2000)
    ]
    assert beside_arrays[1] == pytest.approx(beside_arrays[0], abs=4000)


@compiled_only
def test_sequences_leave_no_python_objects_behind() -> None:
    kv = KVCacheManager(10_000, 4)

    def run(number: int) -> int:
        sequences = [kv.add_sequence(np.arange(400)) for _ in range(number)]
        before = sys.getallocatedblocks()
        kv.extend(sequences, np.zeros(number, dtype=np.int64))
        kv.extend(sequences, [np.arange(40)] * number)
        after = sys.getallocatedblocks()
        for sequence in sequences:
            kv.free(sequence)
        return after - before

    run(50)
    assert abs(run(50) - run(5)) < 20


def test_a_block_that_foreign_keys_name_twice_hits_once() -> None:
    kv = KVCacheManager(8, 4)
    key = np.array([[1, 1]], dtype=np.uint64)
    a = kv.add_keyed_sequence(4, key)
    kv.commit([a])
    b = kv.add_keyed_sequence(13, np.repeat(key, 3, axis=0))
    assert kv.block_table(b).tolist() == [0, 1, 2, 3]
    assert kv.num_cached_tokens(b) == 4
    kv.verify()
    with pytest.raises(NeverFits):
        kv.add_keyed_sequence(20_001, np.repeat(key, 5_000, axis=0))
    kv.commit([b])
    kv.free(a)
    kv.free(b)
    kv.verify()
    assert kv.statistics().cached_blocks == 1


@pytest.mark.parametrize("token_ids", [5, {1}, None])
def test_tokens_that_are_no_list_are_refused(token_ids: object) -> None:
    kv = KVCacheManager(8, 4)
    a = kv.add_sequence([1])
    with pytest.raises(InvalidInput, match="1 sequences, but tokens for"):
        kv.extend([a], token_ids)  # type: ignore[arg-type]


def test_rows_of_an_array_are_the_tokens_of_each_sequence() -> None:
    kv = KVCacheManager(8, 4)
    a, b = kv.add_sequence([1]), kv.add_sequence([2])
    step = kv.extend(np.array([a, b]), np.array([[3, 4], [5, 6]]))
    assert step.query_starts.tolist() == [0, 2, 4]
    assert step.lengths.tolist() == [3, 3]
