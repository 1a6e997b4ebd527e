"""What the scheduler does, one rule a test. Block size 4 unless said."""

from __future__ import annotations

import pytest

from models.scheduled_run import Asked, ScheduledRun
from pagedkv.scheduling.limits import Limits, SchedulerConfig


def limits(
    *, seqs: int = 8, budget: int = 64, chunked: bool = True, watermark: int = 0, size: int = 4
) -> Limits:
    return Limits(size, seqs, budget, chunked, watermark)


@pytest.mark.parametrize(("prompt", "blocks"), [(15, 1), (16, 1), (17, 2), (32, 2)])
def test_a_prompt_takes_exactly_the_blocks_that_hold_it(prompt: int, blocks: int) -> None:
    run = ScheduledRun([Asked(prompt, 3)], 4, limits(size=16))
    run.step()
    assert run.num_free == 4 - blocks
    run.step()
    assert run.num_free == 4 - blocks - (prompt % 16 == 0)


def test_a_token_that_fits_into_the_last_block_needs_no_free_one() -> None:
    run = ScheduledRun([Asked(3, 2), Asked(4, 1)], 2, limits())
    run.step()
    assert run.step().computes == [(0, 3, 1)]


def test_decodes_come_first_and_prompts_share_the_rest_oldest_first() -> None:
    run = ScheduledRun(
        [Asked(12, 4), Asked(2, 9), Asked(9, 2, arrives=1)], 20, limits(budget=8, seqs=4)
    )
    assert run.step().computes == [(0, 0, 8)]
    assert run.step().computes == [(0, 8, 4), (1, 0, 2), (2, 0, 2)]
    assert run.step().computes == [(0, 12, 1), (1, 2, 1), (2, 2, 6)]
    assert run.step().computes == [(0, 13, 1), (1, 3, 1), (2, 8, 1)]


def test_two_prompts_that_fit_only_one_after_the_other_run_one_after_the_other() -> None:
    run = ScheduledRun([Asked(24, 1), Asked(24, 1)], 8, limits(budget=8))
    told = run.steps(at_most=6)
    assert [step.computes for step in told] == [
        *([(0, start, 8)] for start in (0, 8, 16)),
        *([(1, start, 8)] for start in (0, 8, 16)),
    ]


def test_the_youngest_gives_way_and_comes_back_before_all_that_wait() -> None:
    run = ScheduledRun([Asked(4, 9), Asked(4, 9), Asked(4, 1, arrives=2)], 4, limits(seqs=2))
    assert [s for s, _ in run.step().admitted] == [0, 1]
    for _ in range(4):
        assert run.step().preempted == []
    told = run.step()
    assert told.preempted == [(1, 8)] and told.computes == [(0, 8, 1)]
    assert run.waiting == [1, 2]
    assert [s for step in run.steps(at_most=30) for s, _ in step.admitted] == [1, 2]


def test_the_watermark_leaves_blocks_free_unless_nothing_runs() -> None:
    run = ScheduledRun([Asked(16, 2), Asked(4, 1)], 5, limits(watermark=1))
    assert [s for s, _ in run.step().admitted] == [0]
    run = ScheduledRun([Asked(12, 2), Asked(4, 1)], 5, limits(watermark=1))
    assert [s for s, _ in run.step().admitted] == [0, 1]


def test_with_a_watermark_of_everything_requests_run_one_at_a_time() -> None:
    run = ScheduledRun([Asked(3, 2)] * 4, 100, limits(watermark=99))
    assert [step.admitted for step in run.steps(at_most=8)] == [
        [(0, 0)], [], [(1, 0)], [], [(2, 0)], [], [(3, 0)], [],
    ]  # fmt: skip


def test_unchunked_a_prompt_over_the_budget_waits_for_a_step_of_its_own() -> None:
    run = ScheduledRun(
        [Asked(3, 3), Asked(20, 2), Asked(2, 1)], 20, limits(budget=8, chunked=False)
    )
    told = run.steps(at_most=10)
    assert [step.computes for step in told] == [
        [(0, 0, 3)], [(0, 3, 1)], [(0, 4, 1)], [(1, 0, 20)], [(1, 20, 1), (2, 0, 2)],
    ]  # fmt: skip


def test_with_one_seat_requests_are_served_one_by_one_in_order() -> None:
    run = ScheduledRun([Asked(9, 2), Asked(1, 1), Asked(5, 3)], 3, limits(seqs=1, budget=4))
    run.steps(at_most=20)
    assert run.done == [0, 1, 2]


def test_followers_keep_their_seats_and_fork_when_the_prompt_is_done() -> None:
    run = ScheduledRun(
        [Asked(6, 3, samples=3), Asked(1, 1), Asked(1, 1)], 20, limits(seqs=4, budget=4)
    )
    first = run.step()
    assert first.computes == [(0, 0, 4)] and first.forked == []
    second = run.step()
    assert second.computes == [(0, 4, 2), (3, 0, 1)]
    assert second.forked == [1, 2] and run.num_free == 18
    third = run.step()
    assert third.computes == [(0, 6, 1), (1, 6, 1), (2, 6, 1), (4, 0, 1)]
    assert len(third.copies) == 2, "the last to write is alone with the block by then"


def test_a_block_is_kept_for_each_follower_until_it_has_forked() -> None:
    run = ScheduledRun([Asked(6, 3, samples=3), Asked(1, 1)], 4, limits())
    assert [s for s, _ in run.step().admitted] == [0]
    assert run.num_free == 2

    run = ScheduledRun([Asked(9, 3, samples=3), Asked(1, 1, arrives=1)], 5, limits(budget=8))
    run.step()
    assert run.step().admitted == [], "3 blocks for the prompt, 2 for its followers"


def test_a_group_that_finds_no_seats_waits_and_all_behind_it() -> None:
    run = ScheduledRun([Asked(2, 2), Asked(2, 1, samples=3), Asked(2, 1)], 20, limits(seqs=3))
    assert [s for s, _ in run.step().admitted] == [0]
    assert run.step().admitted == []
    assert [s for s, _ in run.step().admitted] == [1]
    assert run.done == [0, 1, 2, 3]


def test_a_preempted_follower_comes_back_alone() -> None:
    run = ScheduledRun([Asked(4, 9, samples=2)], 4, limits())
    told = run.steps(at_most=40)
    assert [step.preempted for step in told if step.preempted] == [[(1, 8)]]
    assert [step.forked for step in told if step.forked] == [[1]]
    assert [step.admitted for step in told if step.admitted] == [[(0, 0)], [(1, 0)]]


def test_watermark_blocks_are_the_share_rounded_down() -> None:
    config = SchedulerConfig(
        max_num_seqs=3, max_num_batched_tokens=9, chunked_prefill=False, watermark=0.29
    )
    assert config.limits(num_blocks=10, block_size=8) == Limits(8, 3, 9, False, 2)
