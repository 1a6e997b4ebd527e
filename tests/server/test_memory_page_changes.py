"""What watchers are told of the memory, beside the memory itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("fastapi", reason="needs the extra [server]")

from models.memory_picture import Picture
from pagedkv.memory.block_table import blocks_for
from pagedkv.memory.blocks import NO_KEY, PUBLISHED
from pagedkv.scheduling.continuous import COLUMNS, Scheduler
from pagedkv.scheduling.limits import SchedulerConfig
from pagedkv.server.memory_page.changes import Changes, Differ
from pagedkv.server.memory_page.happenings import (
    ADMISSION,
    COPY,
    FORK,
    MOST,
    PREEMPTION,
    Happenings,
)

BLOCK_SIZE = 2
NUM_BLOCKS = 12
PROMPTS = ([1, 2, 3], [1, 2, 3, 4, 5, 6], [1, 2, 9, 9, 9], [5], [1, 2, 3, 4, 5, 6, 7, 8])


def made(num_blocks: int = NUM_BLOCKS, seats: int = 4) -> Scheduler:
    config = SchedulerConfig(max_num_seqs=seats, max_num_batched_tokens=6, watermark=0.0)
    return Scheduler(
        num_blocks, config, block_size=BLOCK_SIZE, max_model_len=16, secret=bytes(range(16))
    )


def cached_in_order(scheduler: Scheduler) -> list[int]:
    """Cached blocks as the free list has them, the next to be evicted first."""
    pool = scheduler.arrays.memory.pool
    ends = len(pool.ref_count)
    found = []
    block = int(pool.next_free[ends])
    while block != ends:
        if pool.key_state[block] == PUBLISHED:
            found.append(block)
        block = int(pool.next_free[block])
    return found


class Watched:
    """A scheduler, moved at random, and somebody who looks now and then."""

    def __init__(self) -> None:
        self.scheduler = made()
        self.alive: list[int] = []
        self.differ = Differ(self.scheduler.arrays)
        tables = self.scheduler.arrays.memory.tables
        self.size = (NUM_BLOCKS, *tables.entries.shape)
        self.picture = Picture(*self.size)
        self.now_ms = 0

    def do(self, action: tuple[Any, ...]) -> None:
        match action:
            case ("add", prompt, samples, new):
                self.alive += self.scheduler.add(
                    PROMPTS[prompt], max_new_tokens=new, num_samples=samples
                )
            case ("step", token):
                batch = self.scheduler.schedule()
                self.scheduler.commit(np.full(len(batch.due), token))
                self.keep_alive()
                sequences = self.scheduler.arrays.sequences
                columns = {s: s % COLUMNS for s in self.alive}
                full = [
                    s
                    for s, column in columns.items()
                    if s in batch.due
                    and sequences.num_tokens[column] == sequences.total_tokens[column]
                ]
                self.leave(full)
            case ("cancel", place) if self.alive:
                self.scheduler.cancel([self.alive[place % len(self.alive)]])
                self.keep_alive()
            case ("look",):
                self.look()

    def keep_alive(self) -> None:
        """Forget who is gone, or will be at the end of its fork."""
        arrays = self.scheduler.arrays
        self.alive = [
            s
            for s in self.alive
            if arrays.is_alive[s % COLUMNS]
            and arrays.generation[s % COLUMNS] == s // COLUMNS
            and s % COLUMNS not in self.scheduler._doomed
        ]

    def leave(self, sequences: list[int]) -> None:
        self.scheduler.finish(sequences)
        self.alive = [s for s in self.alive if s not in sequences]

    def look(self) -> Changes:
        self.now_ms += 100
        changes = self.differ.look(self.scheduler.arrays, block_size=BLOCK_SIZE, now_ms=self.now_ms)
        self.picture.apply(changes)
        return changes

    def check(self, picture: Picture) -> None:
        """The picture is the memory, read in the simplest way."""
        arrays = self.scheduler.arrays
        pool, tables = arrays.memory
        for block in range(NUM_BLOCKS):
            _, users, key_state, key, order, _ = picture.blocks[block].tolist()
            assert users == pool.ref_count[block]
            assert key_state == pool.key_state[block]
            assert key == (0 if key_state == NO_KEY else int(pool.key[block, 0]) >> 32)
            assert (order > 0) == (users == 0 and key_state == PUBLISHED)
        cached = [b for b in range(NUM_BLOCKS) if picture.blocks[b, 4]]
        assert sorted(cached, key=lambda b: picture.blocks[b, 4]) == cached_in_order(self.scheduler)
        for row in range(len(tables.num_tokens)):
            held = blocks_for(max(int(tables.num_tokens[row]), 0), BLOCK_SIZE)
            assert picture.tables[row, :held].tolist() == tables.entries[row, :held].tolist()
            assert (picture.tables[row, held:] == -1).all()
        sequences = arrays.sequences
        alive = picture.alive
        assert sorted(alive[:, 0].tolist()) == np.flatnonzero(arrays.is_alive).tolist()
        for column, name, state, row, prompt, tokens, computed, total, admissions in alive.tolist():
            assert name > 0 and state == sequences.state[column]
            assert row == sequences.row[column]
            assert prompt == sequences.prompt_tokens[column]
            assert tokens == sequences.num_tokens[column]
            assert computed == (tables.num_computed[row] if row >= 0 else 0)
            assert total == sequences.total_tokens[column]
            assert admissions == sequences.num_admissions[column]
        assert alive[:, 1].tolist() == sorted(set(alive[:, 1].tolist()))


ACTIONS = st.one_of(
    st.tuples(st.just("add"), st.integers(0, 4), st.integers(1, 3), st.integers(1, 6)),
    st.tuples(st.just("step"), st.integers(1, 3)),
    st.tuples(st.just("step"), st.integers(1, 3)),
    st.tuples(st.just("cancel"), st.integers(0, 9)),
    st.tuples(st.just("look")),
)


@settings(max_examples=150)
@given(st.lists(ACTIONS, max_size=60))
def test_all_changes_together_are_the_memory(actions: list[tuple[Any, ...]]) -> None:
    watched = Watched()
    for action in actions:
        watched.do(action)
        if action[0] == "look":
            watched.check(watched.picture)
    watched.look()
    watched.check(watched.picture)
    again = watched.look()
    assert [len(rows) for rows in again] == [0, 0, 0]


@given(st.lists(ACTIONS, max_size=40))
def test_who_comes_later_is_told_the_same(actions: list[tuple[Any, ...]]) -> None:
    watched = Watched()
    for action in actions:
        watched.do(action)
    watched.look()
    later = Picture(*watched.size)
    later.apply(watched.differ.whole())
    assert (later.blocks == watched.picture.blocks).all()
    assert (later.tables == watched.picture.tables).all()
    assert (later.alive == watched.picture.alive).all()


def test_a_block_that_was_used_again_in_between_goes_last_and_is_young_again() -> None:
    watched = Watched()
    for prompt in ([1, 2, 3], [7, 8, 9]):
        [s] = watched.scheduler.add(prompt, max_new_tokens=2)
        watched.do(("step", 5))
        watched.leave([s])
    watched.look()
    first, second = cached_in_order(watched.scheduler)[:2]
    assert watched.picture.blocks[first, 4] < watched.picture.blocks[second, 4]
    assert watched.picture.blocks[first, 5] == 0, "nobody looked when it came free"
    [s] = watched.scheduler.add([1, 2, 3], max_new_tokens=2)
    watched.do(("step", 5))
    watched.leave([s])
    changes = watched.look()
    assert first in changes.blocks[:, 0] and second not in changes.blocks[:, 0]
    assert watched.picture.blocks[first, 4] > watched.picture.blocks[second, 4]
    assert watched.picture.blocks[first, 5] == watched.now_ms


@pytest.mark.parametrize("is_released", [False, True])
def test_a_block_with_another_key_is_told_where_all_else_is_as_before(is_released: bool) -> None:
    scheduler = made(num_blocks=2)
    differ = Differ(scheduler.arrays)
    pool = scheduler.arrays.memory.pool
    running: list[int] = []
    states = []
    for prompt in ([1, 2, 3], [5, 6, 7], [7, 8, 9]):  # the last one evicts what the first left
        scheduler.finish(running)
        running = scheduler.add(prompt, max_new_tokens=2)
        scheduler.schedule()
        scheduler.commit([9])
        if is_released:
            scheduler.finish(running)
            running = []
        states.append((pool.ref_count.tolist(), pool.key_state.tolist()))
        if len(states) == 1:
            first = differ.look(scheduler.arrays, block_size=BLOCK_SIZE, now_ms=1)
    assert states[2] == states[0]
    changes = differ.look(scheduler.arrays, block_size=BLOCK_SIZE, now_ms=2)
    block, users, key_state, key, _, since_ms = changes.blocks[0].tolist()
    assert [block, users, key_state] == first.blocks[0, :3].tolist()
    assert key == int(pool.key[block, 0]) >> 32 != first.blocks[0, 3]
    assert since_ms == 2


def test_names_count_sequences_as_they_come_and_are_not_given_twice() -> None:
    watched = Watched()
    for expected in (1, 2, 3):
        [s] = watched.scheduler.add([expected, 2], max_new_tokens=1)
        changes = watched.look()
        assert changes.sequences[-1, 1] == expected
        watched.scheduler.cancel([s])
    assert watched.picture.by_column and watched.look().sequences[0, 1] == 0


def test_tokens_change_nothing_that_is_told_but_keys() -> None:
    told = []
    for prompt in ([1, 2, 3, 4, 5], [50, 60, 70, 80, 90]):
        watched = Watched()
        watched.scheduler.add(prompt, max_new_tokens=4)
        watched.do(("step", prompt[0]))
        watched.do(("step", prompt[1]))
        told.append(watched.look())
    one, other = told
    assert (one.blocks[:, 3] != other.blocks[:, 3]).any()
    one.blocks[:, 3] = other.blocks[:, 3] = 0
    for mine, theirs in zip(one, other):
        assert (mine == theirs).all()


def happened(scheduler: Scheduler, happenings: Happenings, differ: Differ) -> list[list[int]]:
    arrays = scheduler.arrays
    happenings.note(arrays)
    return happenings.taken(differ.names(arrays)).tolist()


def test_hits_forks_and_copies_are_told_with_who_and_how_much() -> None:
    scheduler = made()
    differ, happenings = Differ(scheduler.arrays), Happenings()
    [a] = scheduler.add([1, 2, 3, 4, 5], max_new_tokens=1)
    scheduler.schedule()
    scheduler.commit([6])
    assert happened(scheduler, happenings, differ) == [[ADMISSION, 0, 1, 0]]
    scheduler.finish([a])
    first, second = (
        s % COLUMNS for s in scheduler.add([1, 2, 3, 4, 5], max_new_tokens=4, num_samples=2)
    )
    scheduler.schedule()
    scheduler.commit([6, 7])
    told = happened(scheduler, happenings, differ)
    assert told == [[ADMISSION, first, 2, 4], [FORK, second, 3, 0]]
    batch = scheduler.schedule()
    scheduler.commit([6, 7])
    [[source, target]] = batch.copies.tolist()
    assert happened(scheduler, happenings, differ) == [[COPY, source, target, 0]]
    scheduler.schedule()
    scheduler.commit([6, 7])
    assert happened(scheduler, happenings, differ) == []


def test_who_gives_way_is_told() -> None:
    scheduler = made(num_blocks=4, seats=2)
    differ, happenings = Differ(scheduler.arrays), Happenings()
    scheduler.add([1, 2, 3], max_new_tokens=5)
    [young] = scheduler.add([5, 6, 7], max_new_tokens=5)
    told = []
    for _ in range(4):
        batch = scheduler.schedule()
        scheduler.commit(np.ones(len(batch.due)).astype(int))
        told += happened(scheduler, happenings, differ)
        if len(batch.preempted):
            assert batch.preempted.tolist() == [young]
            assert [row[1] for row in told if row[0] == PREEMPTION] == [young % COLUMNS]
            break
    else:
        raise AssertionError("nobody gave way")


def test_of_very_many_happenings_between_two_looks_some_are_kept() -> None:
    scheduler = made()
    happenings = Happenings()
    scheduler.add([1], max_new_tokens=1)
    scheduler.schedule()
    for _ in range(MOST + 10):
        happenings.note(scheduler.arrays)
    names = Differ(scheduler.arrays).names(scheduler.arrays)
    assert len(happenings.taken(names)) == MOST and len(happenings.taken(names)) == 0
