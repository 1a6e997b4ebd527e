"""Steps that are decided while the one before runs, on a device that computes as late as it may."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.late_device import LateDevice, said_alone
from pagedkv.errors import InvalidInput, UnknownSequence
from pagedkv.memory.blocks import PUBLISHED
from pagedkv.scheduling.continuous import CHOSEN_LATER, Batch, Scheduler
from pagedkv.scheduling.limits import SchedulerConfig

STOP = 0
"""The token that ends an answer."""


class Run:
    """What an engine does: a step is decided ahead or not, and ends are seen when tokens are."""

    def __init__(self, num_blocks: int = 16, *, budget: int = 16, **options: object) -> None:
        config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=budget, watermark=0.0)
        options = {"block_size": 4, "max_model_len": 200, **options}
        self.scheduler = Scheduler(num_blocks, config, **options)
        self.device = LateDevice(num_blocks, self.scheduler.block_size)
        self.said: dict[int, list[int]] = {}
        self.sample: dict[int, int] = {}
        self.left: dict[int, int] = {}
        self.lost: set[int] = set()
        self.under_way: list[Batch] = []
        self.contents: dict[tuple[int, int], tuple[int, ...]] = {}
        self.num_ahead = 0

    def add(self, prompt: list[int], answer: int, samples: int = 1) -> list[int]:
        numbers = self.scheduler.add(prompt, max_new_tokens=answer, num_samples=samples)
        for sample, number in enumerate(numbers):
            self.said[number], self.sample[number], self.left[number] = [], sample, answer
        return numbers

    def schedule(self) -> None:
        if not self.under_way:
            self.launch(self.scheduler.schedule())

    def schedule_ahead(self) -> bool:
        batch = self.scheduler.schedule_ahead()
        if batch is None:
            return False
        self.num_ahead += 1
        self.launch(batch)
        return True

    def launch(self, batch: Batch) -> None:
        self.device.launch(batch, self.sample.__getitem__)
        self.under_way.append(batch)

    def retire(self, *, fails: bool = False) -> None:
        said = self.device.read()
        batch = self.under_way.pop(0)
        if fails:
            self.lose(self.scheduler.abandon())
            return
        self.scheduler.commit(said)
        done = []
        for s, token in zip(batch.due.tolist(), said, strict=True):
            if s in self.left:
                self.said[s].append(token)
                self.left[s] -= 1
                if self.left[s] == 0 or token == STOP:
                    done.append(s)
        self.scheduler.finish(done)
        self.forget(done)

    def cancel(self, numbers: list[int]) -> None:
        self.scheduler.cancel([s for s in numbers if s in self.left])
        self.lose(numbers)
        # With it go the samples that were to fork from it.
        self.lose([s for s in self.left if not self.is_known(s)])

    def is_known(self, sequence: int) -> bool:
        try:
            self.scheduler.token_ids(sequence)
        except UnknownSequence:
            return False
        return True

    def lose(self, numbers: list[int]) -> None:
        """These end before they have said all."""
        self.lost |= self.left.keys() & set(numbers)
        self.forget(numbers)

    def forget(self, numbers: list[int]) -> None:
        for s in numbers:
            self.left.pop(s, None)

    def step(
        self, *, ahead: bool = True, cancels: tuple[int, ...] = (), fails: bool = False
    ) -> None:
        """One turn; `cancels` go away while two steps are under way, if two are."""
        self.schedule()
        self.check()
        if ahead:
            self.schedule_ahead()
            self.check()
        self.cancel(list(cancels))
        self.check()
        self.retire(fails=fails)
        self.check()

    def check(self) -> None:
        """The laws hold, and what can be found is there, the same whenever somebody looks."""
        self.scheduler.verify()
        pool = self.scheduler.arrays.memory.pool
        for block in np.flatnonzero(pool.key_state == PUBLISHED).tolist():
            key = (int(pool.key[block, 0]), int(pool.key[block, 1]))
            content = tuple(self.device.pages[block].tolist())
            assert -1 not in content and self.contents.setdefault(key, content) == content

    def finish_all(self, *, ahead: bool = True) -> None:
        for _ in range(5_000):
            if self.scheduler.is_idle:
                return
            self.step(ahead=ahead)
        raise AssertionError("somebody waits for ever")


def expected(prompt: list[int], answer: int, sample: int) -> list[int]:
    said = said_alone(prompt, answer, sample)
    return said[: said.index(STOP) + 1] if STOP in said else said


requests = st.tuples(
    st.lists(st.integers(1, 4), min_size=1, max_size=22), st.integers(1, 14), st.integers(1, 3)
)
happenings = st.tuples(
    st.integers(0, 3),  # steps before it
    requests,
    st.booleans(),  # whether these steps are decided ahead
    st.integers(0, 9),  # who is cancelled, of those there are
    st.integers(0, 15),  # whether the step fails
)


@given(
    happenings=st.lists(happenings, max_size=14),
    block_size=st.sampled_from([1, 3, 4, 16]),
    num_slots=st.integers(60, 120),
    budget=st.integers(4, 30),
    caching=st.booleans(),
)
def test_everybody_says_the_same_ahead_or_not_whatever_comes_goes_and_fails(
    happenings: list[tuple[int, tuple[list[int], int, int], bool, int, int]],
    block_size: int,
    num_slots: int,
    budget: int,
    caching: bool,
) -> None:
    run = Run(num_slots // block_size, block_size=block_size, budget=budget, prefix_caching=caching)
    asked: dict[int, list[int]] = {}
    for pause, (prompt, answer, samples), ahead, leaves, fails in happenings:
        for _ in range(pause):
            alive = list(run.left)
            leaving = alive[leaves : leaves + 1] if leaves < 8 else []
            run.step(ahead=ahead, cancels=tuple(leaving), fails=fails == 0)
        for i, s in enumerate(run.add(prompt, answer, samples)):
            asked[s] = expected(prompt, answer, i)
    run.finish_all()
    for s, said in asked.items():
        if s in run.lost:
            assert run.said[s] == said[: len(run.said[s])]
        else:
            assert run.said[s] == said
    assert run.scheduler.statistics().used_blocks == 0


def test_the_tokens_of_the_running_step_are_awaited_where_they_belong() -> None:
    run = Run()
    a, b = run.add([1, 2, 3], 5) + run.add([1, 2, 3, 4, 1, 2], 5)
    run.schedule()
    assert run.scheduler.schedule_ahead() is not None
    batch = run.scheduler._under_way[1].batch
    assert batch.sequences.tolist() == [a, b]
    assert batch.token_ids.tolist() == [CHOSEN_LATER, CHOSEN_LATER]
    assert batch.awaited.tolist() == [[0, 0], [1, 1]]
    assert batch.positions.tolist() == [3, 6]


def test_a_prompt_that_goes_on_awaits_nothing() -> None:
    run = Run(budget=8)
    a, b = run.add([1, 2, 3], 5) + run.add([1, 2, 3, 4] * 3, 5)
    run.schedule()
    run.schedule_ahead()
    batch = run.under_way[1]
    assert batch.sequences.tolist() == [a, b]
    assert batch.awaited.tolist() == [[0, 0]]
    assert batch.token_ids.tolist() == [CHOSEN_LATER, 2, 3, 4, 1, 2, 3, 4]


def test_a_block_that_an_awaited_token_fills_is_found_once_it_is_there() -> None:
    run = Run()
    [first] = run.add([1, 1, 4], 6)
    run.finish_all()
    assert len(run.said[first]) == 6
    run.add([1, 1, 4, *run.said[first], 1], 1)
    run.schedule()
    assert run.under_way[0].num_cached.tolist() == [8]


def test_who_has_its_last_token_coming_computes_nothing_more() -> None:
    run = Run()
    run.add([1, 2, 3], 2)
    run.schedule()
    assert run.schedule_ahead()
    run.retire()
    assert not run.schedule_ahead()
    run.retire()
    assert run.scheduler.is_idle


def test_who_has_all_tokens_is_to_be_finished_before_another_step_is_decided_ahead() -> None:
    made = Run().scheduler
    [full] = made.add([1, 2], max_new_tokens=1)
    [other] = made.add([3, 4], max_new_tokens=5)
    made.schedule()
    assert made.schedule_ahead() is not None
    made.commit([5, 6])
    with pytest.raises(InvalidInput, match=f"sequence {full} has all of its 3 tokens"):
        made.schedule_ahead()
    made.finish([full])
    ahead = made.schedule_ahead()
    assert ahead is not None and ahead.due.tolist() == [other]


def test_whoever_stops_early_has_its_blocks_back_before_the_next_step_is_decided() -> None:
    prompt = next(
        [i, j] for i in range(1, 5) for j in range(1, 5) if said_alone([i, j], 1, 0) == [STOP]
    )
    run = Run(2)
    run.add(prompt, 6)
    [waits] = run.add([1, 1, 4, 1, 1], 2)
    run.schedule()
    assert run.schedule_ahead()  # computes what nobody wants any more
    run.retire()
    assert run.schedule_ahead()
    assert run.under_way[1].admitted.tolist() == [waits]
    run.retire()
    run.finish_all()
    assert run.said[waits] == expected([1, 1, 4, 1, 1], 2, 0)


def test_a_step_in_which_somebody_would_give_way_is_not_decided_ahead() -> None:
    run = Run(7, budget=64)
    both = [run.add([i, 1, 1, 4], 12)[0] for i in (1, 2)]
    refused = 0
    while not run.scheduler.is_idle:
        run.schedule()
        refused += not run.schedule_ahead()
        run.retire()
        run.scheduler.verify()
    assert refused and run.num_ahead
    assert [run.said[s] for s in both] == [expected([i, 1, 1, 4], 12, 0) for i in (1, 2)]


def test_beams_wait_for_each_other() -> None:
    run = Run()
    run.scheduler.add_search([1, 2, 3], max_new_tokens=4, num_beams=2)
    run.scheduler.schedule()
    assert run.scheduler.schedule_ahead() is None


def test_a_failed_step_ends_its_own_in_the_next_one_too_and_that_goes_on() -> None:
    run = Run(budget=8)
    prompt = [1, 1, 4, 1, 1]
    [fails] = run.add(prompt, 9)
    run.schedule()
    [waits] = run.add(prompt, 9)
    assert run.schedule_ahead()
    assert run.under_way[1].sequences.tolist() == [fails, waits]
    run.retire(fails=True)
    run.check()
    with pytest.raises(UnknownSequence):
        run.scheduler.cancel([fails])
    run.finish_all()
    assert run.said[waits] == expected(prompt, 9, 0)


def test_only_one_step_is_decided_ahead() -> None:
    run = Run()
    with pytest.raises(InvalidInput, match="0 steps are under way"):
        run.scheduler.schedule_ahead()
    run.add([1, 1, 4], 9)
    run.schedule()
    run.schedule_ahead()
    with pytest.raises(InvalidInput, match="2 steps are under way"):
        run.scheduler.schedule_ahead()
