from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.token_storage import TokenStorage
from pagedkv.errors import InvalidInput, NeverFits, UnknownSequence
from pagedkv.scheduling.continuous import COLUMNS, Scheduler
from pagedkv.scheduling.limits import SchedulerConfig


def next_token(tokens: list[int], sample: int) -> int:
    """What a made-up model says after `tokens`; samples of a prompt differ."""
    return (7 * sum(tokens) + 3 * len(tokens) + 11 * sample + tokens[-1]) % 5


class Written:
    """A run on token storage: what is read through the block tables must be what belongs there."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.storage = TokenStorage(scheduler.num_blocks, scheduler.block_size)
        self.tokens: dict[int, list[int]] = {}
        self.sample: dict[int, int] = {}
        self.left: dict[int, int] = {}

    def add(self, prompt: list[int], answer: int, samples: int = 1, **options: object) -> list[int]:
        numbers = self.scheduler.add(prompt, max_new_tokens=answer, num_samples=samples, **options)
        for sample, number in enumerate(numbers):
            self.tokens[number] = list(prompt)
            self.sample[number] = sample
            self.left[number] = answer
        return numbers

    def run(self) -> list[int]:
        """The model's part of a step: what each due sequence says."""
        batch = self.scheduler.schedule()
        self.batch = batch
        assert (batch.slots >= 0).all()
        self.storage.copy_pages(batch.copies)
        for i, s in enumerate(batch.sequences.tolist()):
            start, stop = batch.query_starts[i], batch.query_starts[i + 1]
            positions = batch.positions[start:stop]
            length = int(batch.lengths[i])
            assert positions.tolist() == list(range(length - (stop - start), length))
            assert batch.token_ids[start:stop].tolist() == self.tokens[s][positions[0] : length]
            content = self.storage.content("", self.tokens[s], int(positions[0]), length)
            self.storage.write(batch.slots[start:stop], content)
        for i, s in enumerate(batch.sequences.tolist()):
            length, block_size = int(batch.lengths[i]), self.scheduler.block_size
            places = np.arange(length)
            table = batch.block_tables[i].astype(np.int64)
            slots = table[places // block_size] * block_size + places % block_size
            expected = self.storage.content("", self.tokens[s], 0, length)
            assert self.storage.read(slots).tolist() == expected.tolist()
            assert (table[-(-length // block_size) :] == -1).all()
        ends = batch.query_starts[1:] - 1
        assert set(batch.due_rows.tolist()) <= set(ends.tolist())
        return [next_token(self.tokens[s], self.sample[s]) for s in batch.due.tolist()]

    def step(self) -> list[int]:
        """One step; returns the sequences that are done with it."""
        said = self.run()
        self.scheduler.commit(said)
        done = []
        for s, token in zip(self.batch.due.tolist(), said, strict=True):
            if s in self.left:  # not cancelled meanwhile
                self.tokens[s].append(token)
                self.left[s] -= 1
                if self.left[s] == 0:
                    done.append(s)
        self.scheduler.finish(done)
        for s in done:
            del self.left[s]
        self.scheduler.verify()
        self.check_fill()
        return done

    def check_fill(self) -> None:
        """What the statistics say of blocks and slots, slot by slot."""
        tables, size = self.scheduler._memory.tables, self.scheduler.block_size
        held: set[tuple[int, int]] = set()
        users: Counter[int] = Counter()
        for row in np.flatnonzero(tables.num_tokens > 0).tolist():
            num_tokens = int(tables.num_tokens[row])
            table = tables.entries[row, : -(-num_tokens // size)].tolist()
            users.update(table)
            held.update((table[t // size], t % size) for t in range(num_tokens))
        told = self.scheduler.statistics()
        assert told.used_blocks == len(users)
        assert told.shared_blocks == sum(count > 1 for count in users.values())
        assert told.held_tokens == len(held)

    def cancel(self, numbers: list[int]) -> None:
        self.scheduler.cancel(numbers)
        for s in numbers:
            self.left.pop(s)

    def finish_all(self) -> None:
        for _ in range(10_000):
            if self.scheduler.is_idle:
                return
            self.step()
        raise AssertionError("somebody waits for ever")


def scheduler(
    num_blocks: int = 16,
    *,
    block_size: int = 4,
    seats: int = 8,
    budget: int = 16,
    watermark: float = 0.0,
    **options: object,
) -> Scheduler:
    config = SchedulerConfig(max_num_seqs=seats, max_num_batched_tokens=budget, watermark=watermark)
    options = {"max_model_len": 200, **options}
    return Scheduler(num_blocks, config, block_size=block_size, **options)


def alone(prompt: list[int], answer: int, sample: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(answer):
        tokens.append(next_token(tokens, sample))
    return tokens


requests = st.tuples(
    st.lists(st.integers(0, 4), min_size=1, max_size=25), st.integers(1, 12), st.integers(1, 3)
)


@given(
    arrivals=st.lists(st.tuples(st.integers(0, 3), requests, st.integers(0, 30)), max_size=14),
    block_size=st.sampled_from([1, 3, 4, 16]),
    num_slots=st.integers(60, 120),
    budget=st.integers(4, 30),
    caching=st.booleans(),
)
def test_everybody_reads_what_belongs_to_them_whatever_comes_and_goes(
    arrivals: list[tuple[int, tuple[list[int], int, int], int]],
    block_size: int,
    num_slots: int,
    budget: int,
    caching: bool,
) -> None:
    run = Written(
        scheduler(
            num_slots // block_size,
            block_size=block_size,
            seats=4,
            budget=budget,
            prefix_caching=caching,
        )
    )
    expected = {}
    doomed: dict[int, list[list[int]]] = {}
    step = 0
    for pause, (prompt, answer, samples), leaves in arrivals:
        for _ in range(pause):
            run.step()
            step += 1
            for group in doomed.pop(step, []):
                run.cancel([s for s in group if s in run.left])
        if -(-(len(prompt) + answer - 1) // block_size) > run.scheduler.num_blocks:
            continue
        group = run.add(prompt, answer, samples)
        if leaves > 20:
            # Some samples of a group, and then the others.
            some = group[leaves % len(group) :]
            doomed.setdefault(step + leaves - 20, []).append(some)
            doomed.setdefault(step + leaves - 20 + leaves % 3, []).append(group)
        else:
            expected.update({s: alone(prompt, answer, i) for i, s in enumerate(group)})
    run.finish_all()
    assert {s: run.tokens[s] for s in expected} == expected
    statistics = run.scheduler.statistics()
    assert statistics.used_blocks == 0
    if not caching:
        assert statistics.hit_tokens == 0


def test_tokens_that_were_generated_are_found_again_by_a_later_prompt() -> None:
    run = Written(scheduler())
    [first] = run.add([1, 2, 3], 9)
    run.finish_all()
    said = run.tokens[first]
    run.add([*said, 0, 0], 1)
    run.step()
    assert run.batch.num_cached.tolist() == [8]  # 11 of the 12 were computed: two full blocks


def test_a_prompt_is_its_own_prefix_except_for_its_last_token() -> None:
    run = Written(scheduler())
    run.add([1, 2, 3, 4, 0, 1, 2, 3], 1)
    run.finish_all()
    run.add([1, 2, 3, 4, 0, 1, 2, 3], 1)
    run.step()
    assert run.batch.num_cached.tolist() == [4]


def test_two_identical_prompts_in_one_step_are_both_right() -> None:
    run = Written(scheduler(budget=64))
    prompt = [1, 2, 3, 4, 0, 1, 2, 3, 4]
    both = [run.add(prompt, 5)[0] for _ in range(2)]
    run.step()
    assert run.batch.num_cached.tolist() == [0, 0]
    run.finish_all()
    assert [run.tokens[s] for s in both] == [alone(prompt, 5, 0)] * 2


def test_a_preempted_sequence_goes_on_as_if_it_had_not_been() -> None:
    run = Written(scheduler(7, budget=64))
    both = [run.add([i, 1, 2, 3, 4, 0], 14)[0] for i in range(2)]
    run.finish_all()
    statistics = run.scheduler.statistics()
    assert statistics.preemptions > 0 and statistics.recomputed_tokens > 0
    assert [run.tokens[s] for s in both] == [alone([i, 1, 2, 3, 4, 0], 14, 0) for i in range(2)]


def test_forks_write_different_tokens_into_a_block_that_they_shared() -> None:
    run = Written(scheduler())
    group = run.add([1, 2, 3, 4, 0, 1], 6, 3)
    run.step()
    assert run.batch.due.tolist() == group and len(set(run.batch.due_rows.tolist())) == 1
    used = run.scheduler.statistics()
    assert (used.used_blocks, used.shared_blocks, used.table_entries) == (2, 2, 6)
    run.step()
    assert len(run.batch.copies) == 2  # the last of the three is alone with the old block
    run.finish_all()
    assert [run.tokens[s] for s in group] == [alone([1, 2, 3, 4, 0, 1], 6, i) for i in range(3)]


def test_forking_when_memory_is_full_makes_samples_wait_and_breaks_nothing() -> None:
    run = Written(scheduler(4))
    group = run.add([1, 2, 3, 4, 0, 1, 2], 8, 4)  # each of them needs all of the blocks at last
    run.finish_all()
    assert run.scheduler.statistics().preemptions > 0
    assert [run.tokens[s] for s in group] == [alone([1, 2, 3, 4, 0, 1, 2], 8, i) for i in range(4)]


def test_two_that_fit_only_one_after_the_other_both_finish() -> None:
    run = Written(scheduler(8, budget=64))
    both = [run.add([i] * 24, 8)[0] for i in (1, 2)]
    run.finish_all()
    assert run.scheduler.statistics().peak_running == 1
    assert [run.tokens[s] for s in both] == [alone([i] * 24, 8, 0) for i in (1, 2)]


def test_what_can_never_fit_is_refused_when_it_arrives_and_the_others_go_on() -> None:
    run = Written(scheduler(4))
    [other] = run.add([1, 2, 3], 4)
    with pytest.raises(NeverFits, match="request big needs 5 blocks, the whole memory has 4"):
        run.add([1] * 10, 8, name="big")
    run.add([1] * 10, 7)  # 16 of its 17 tokens are computed
    run.finish_all()
    assert run.tokens[other] == alone([1, 2, 3], 4, 0)


@pytest.mark.parametrize("steps", range(8))
def test_a_cancelled_sequence_gives_back_every_block_at_any_moment(steps: int) -> None:
    run = Written(scheduler(budget=8))
    group = run.add([1, 2, 3, 4] * 5, 8, 2)
    [other] = run.add([3, 2, 1], 8)
    for _ in range(steps):
        run.step()
    run.cancel([s for s in group if s in run.left])
    run.scheduler.verify()
    run.finish_all()
    assert run.tokens[other] == alone([3, 2, 1], 8, 0)
    assert run.scheduler.statistics().used_blocks == 0


@pytest.mark.parametrize("steps", range(6))
def test_cancelling_within_a_step_takes_effect_when_it_is_committed(steps: int) -> None:
    run = Written(scheduler(budget=8))
    group = run.add([1, 2, 3, 4] * 5, 8, 2)
    for _ in range(steps):
        run.step()
    said = run.run()
    held = run.scheduler.statistics().used_blocks
    run.cancel(group)
    assert run.scheduler.statistics().used_blocks == held > 0
    with pytest.raises(UnknownSequence):
        run.scheduler.finish(group[:1])
    run.scheduler.commit(said)
    run.scheduler.verify()
    assert run.scheduler.is_idle and run.scheduler.statistics().used_blocks == 0


def test_a_sample_cancelled_before_its_fork_ends_after_it_and_the_others_go_on() -> None:
    run = Written(scheduler(budget=4 + 4, seats=8))
    group = run.add([1, 2, 3, 4] * 3, 4, 3)
    run.step()
    run.cancel([group[1]])
    run.finish_all()
    assert run.scheduler.statistics().used_blocks == 0
    for i in (0, 2):
        assert run.tokens[group[i]] == alone([1, 2, 3, 4] * 3, 4, i)


def test_a_sample_that_was_to_end_after_its_fork_ends_with_whom_it_would_have_forked_from() -> None:
    scheduler = Scheduler(20, SchedulerConfig(watermark=0.0), block_size=4, max_model_len=40)
    first, second = scheduler.add([1, 2, 3], max_new_tokens=5, num_samples=2)
    scheduler.cancel([second])
    scheduler.cancel([first])
    assert scheduler.is_idle
    [other] = scheduler.add([4, 5, 6], max_new_tokens=5)
    assert scheduler.schedule().sequences.tolist() == [other]
    scheduler.commit([7])
    scheduler.finish([other])
    scheduler.verify()
    assert scheduler.statistics().used_blocks == 0


@pytest.mark.parametrize("is_scheduled", [False, True])
def test_samples_end_with_whom_they_would_have_forked_from(is_scheduled: bool) -> None:
    made = scheduler()
    samples = made.add([1, 2, 3], max_new_tokens=4, num_samples=3)
    if is_scheduled:
        made.schedule()
    made.finish(samples[:1])
    if is_scheduled:
        made.commit([9, 9, 9])
    assert not made.arrays.is_alive.any()
    for sample in samples:
        with pytest.raises(UnknownSequence):
            made.cancel([sample])
    with pytest.raises(InvalidInput, match="sequence is None: give an integer"):
        made.cancel([None])  # type: ignore[list-item]
    assert made.is_idle
    made.verify()


@pytest.mark.parametrize("end", ["cancel", "finish"])
def test_who_ends_takes_nobody_along_who_has_the_columns_of_its_samples(end: str) -> None:
    run = Written(scheduler(64))
    samples = run.add([1, 2, 3], 9, samples=3)
    run.step()
    run.cancel(samples[1:])
    others = run.add([4, 2, 3], 5, samples=2)
    columns = [s % COLUMNS for s in samples[1:]]
    assert [s % COLUMNS for s in others] == columns  # or this tests nothing
    getattr(run.scheduler, end)(samples[:1])
    run.finish_all()
    assert [run.tokens[s] for s in others] == [alone([4, 2, 3], 5, i) for i in range(2)]


def test_an_abandoned_step_publishes_nothing_and_leaves_the_others() -> None:
    run = Written(scheduler(seats=2, budget=64))
    prompt = [1, 2, 3, 4, 0, 1, 2, 3, 4]
    run.add(prompt, 4, 2)
    [waits] = run.add(prompt, 4)
    run.run()
    assert len(run.scheduler.abandon()) == 2
    run.scheduler.verify()
    run.step()
    assert run.batch.num_cached.tolist() == [0]
    run.finish_all()
    assert run.tokens[waits] == alone(prompt, 4, 0)
    assert run.scheduler.statistics().used_blocks == 0


def test_a_sequence_that_ended_is_unknown_even_when_its_column_has_another() -> None:
    run = Written(scheduler())
    [first] = run.add([1, 2], 1)
    run.finish_all()
    [second] = run.add([1, 2], 1)
    assert second != first
    for ended in (first, -1, 10**9):
        with pytest.raises(UnknownSequence):
            run.scheduler.cancel([ended])
    assert run.scheduler.token_ids(second).tolist() == [1, 2]


def test_a_recycled_column_is_not_taken_for_the_one_that_was_found_not_to_fit() -> None:
    run = Written(scheduler(6, budget=64))
    [runs] = run.add([1] * 8, 12)
    run.step()
    [blocked] = run.add([2] * 16, 2)
    run.step()  # it is found not to fit
    run.cancel([blocked])
    [small] = run.add([3], 2)
    run.step()
    assert small in run.batch.admitted.tolist()
    run.finish_all()
    assert runs not in run.left


def test_a_prompt_that_must_be_computed_whole_neither_hits_nor_is_hit() -> None:
    run = Written(scheduler(budget=64))
    prompt = [1, 2, 3, 4, 0, 1, 2, 3, 4]
    for reuse, cached in ((False, 0), (True, 0), (False, 0), (True, 8)):
        run.add(prompt, 1, reuse=reuse)
        run.step()
        assert run.batch.num_cached.tolist() == [cached]
        run.finish_all()


def test_namespaces_share_nothing() -> None:
    run = Written(scheduler(budget=64))
    prompt = [1, 2, 3, 4, 0]
    for salt, cached in (("a", 0), ("b", 0), ("a", 4)):
        run.add(prompt, 1, namespace={"salt": salt})
        run.step()
        assert run.batch.num_cached.tolist() == [cached]
        run.finish_all()


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([], {}, "at least one token"),
        ([-1], {}, "token id"),
        ([2**32], {}, "token id"),
        ([0.5], {}, "integers"),
        ([1], {"max_new_tokens": 0}, "at least 1"),
        ([[1], 2], {}, "not all integers"),
        ([1], {"max_new_tokens": 1.5}, "max_new_tokens is 1.5: give an integer"),
        ([1], {"num_samples": True}, "the number of samples is True: give an integer"),
        ([1] * 190, {"max_new_tokens": 11}, "more than the model's maximum, 200"),
        ([1], {"num_samples": 9}, "max_num_seqs is 8"),
    ],
)
def test_bad_requests_are_refused_in_one_line(
    prompt: list[int], options: dict[str, int], message: str
) -> None:
    made = scheduler(64)
    with pytest.raises(InvalidInput, match=message) as refusal:
        made.add(prompt, **{"max_new_tokens": 1, **options})
    assert "\n" not in str(refusal.value)
    assert made.is_idle
    made.verify()


def test_commit_wants_a_token_for_each_sequence_that_is_due_one() -> None:
    made = scheduler()
    with pytest.raises(InvalidInput, match="no step"):
        made.commit([])
    made.add([1, 2], max_new_tokens=1)
    made.schedule()
    with pytest.raises(InvalidInput, match="2 tokens, but 1"):
        made.commit([1, 2])
    with pytest.raises(InvalidInput, match="token id"):
        made.commit([-1])
    with pytest.raises(InvalidInput, match="tokens are float64: give integers"):
        made.commit([0.5])
    with pytest.raises(InvalidInput, match="under way"):
        made.schedule()
    made.commit([1])


def test_who_has_all_tokens_is_to_be_finished_before_the_next_step() -> None:
    made = scheduler()
    [full] = made.add([1, 2], max_new_tokens=1)
    [other] = made.add([3, 4], max_new_tokens=3)
    made.schedule()
    made.commit([5, 6])
    with pytest.raises(InvalidInput, match=f"sequence {full} has all of its 3 tokens: finish it"):
        made.schedule()
    made.finish([full])
    assert made.schedule().due.tolist() == [other]
    made.commit([7])
    assert made.token_ids(other).tolist() == [3, 4, 6, 7]
    made.verify()


def test_sixty_four_groups_of_eight_share_what_can_be_shared_by_hand() -> None:
    prompt, samples, answer, block_size = 500, 8, 20, 16
    made = scheduler(12_000, block_size=block_size, seats=512, budget=8192, max_model_len=1000)
    for i in range(64):
        ids = np.random.default_rng(i).integers(0, 1000, prompt)
        made.add(ids, max_new_tokens=answer + 10, num_samples=samples)
    due = 0
    while due < 512:
        batch = made.schedule()
        due = len(batch.due)
        made.commit(np.arange(due))
    for _ in range(answer):
        made.schedule()
        made.commit(np.arange(512))
    made.verify()
    # 31 full blocks that all samples share, and behind them what each has alone.
    statistics = made.statistics()
    own_blocks = statistics.table_entries - 512 * (prompt // block_size)
    by_hand = 64 * (prompt // block_size) + own_blocks
    assert statistics.preemptions == 0
    assert by_hand <= statistics.used_blocks <= 1.02 * by_hand
