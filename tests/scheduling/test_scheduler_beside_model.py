"""The compiled scheduler decides what its slow twin decides, step by step, without a cache."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from models.scheduled_run import Asked, ScheduledRun
from models.scheduler_model import ModelSequence, SchedulerModel
from pagedkv.memory.laws import broken_laws
from pagedkv.scheduling import queues as queue
from pagedkv.scheduling import scheduler
from pagedkv.scheduling.limits import Limits
from pagedkv.scheduling.scheduler import COPIES, FORKED, PREEMPTED, SCHEDULED


@st.composite
def settings_and_requests(draw: st.DrawFn) -> tuple[int, Limits, list[Asked]]:
    block_size = draw(st.sampled_from([1, 2, 3, 4]))
    max_num_seqs = draw(st.integers(1, 6))
    limits = Limits(
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + draw(st.integers(0, 12)),
        chunked_prefill=draw(st.booleans()),
        watermark_blocks=draw(st.sampled_from([0, 0, 1, 2, 30])),
    )
    requests = draw(
        st.lists(
            st.builds(
                Asked,
                prompt=st.integers(1, 14),
                output=st.integers(1, 12),
                samples=st.sampled_from([n for n in (1, 1, 1, 2, 3, 4) if n <= max_num_seqs]),
                arrives=st.integers(0, 12),
            ),
            min_size=1,
            max_size=9,
        )
    )
    requests.sort(key=lambda r: r.arrives)
    largest = max(-(-(r.prompt + r.output - 1) // block_size) for r in requests)
    num_blocks = largest + draw(st.integers(0, 10))
    return num_blocks, limits, requests


def beside(case: tuple[int, Limits, list[Asked]]) -> tuple[ScheduledRun, SchedulerModel]:
    """Both at their beginning."""
    num_blocks, limits, requests = case
    model = SchedulerModel(
        [
            ModelSequence(0, r.prompt, r.prompt + r.output, r.samples - 1 if j == 0 else 0)
            for r in requests
            for j in range(r.samples)
        ],
        num_blocks,
        limits.block_size,
        limits.max_num_seqs,
        limits.max_num_batched_tokens,
        limits.chunked_prefill,
        limits.watermark_blocks,
    )
    for number, sequence in enumerate(model.sequences):
        sequence.number = number
    return ScheduledRun(requests, num_blocks, limits), model


@given(settings_and_requests())
def test_every_step_is_the_models_step(case: tuple[int, Limits, list[Asked]]) -> None:
    num_blocks, _, requests = case
    run, model = beside(case)
    idle = 0
    while not run.is_over:
        for i, request in enumerate(requests):
            if request.arrives == run.num_steps:
                model.arrive(run.lead_of[i])
        expected = model.schedule()
        told = run.step(between=lambda: _check_blocks(run, model))
        assert told.computes == expected.computes
        assert [s for s, _ in told.admitted] == expected.admitted
        assert all(cached == 0 for _, cached in told.admitted)
        assert told.preempted == expected.preempted
        assert len(told.copies) == expected.num_copies
        sampled, forked = model.commit()
        assert (told.sampled, told.forked) == (sampled, forked)
        assert told.done == model.drop_done()
        assert run.running == [s.number for s in model.running]
        assert run.waiting == [s.number for s in model.waiting]
        idle = 0 if told.computes else idle + 1
        assert idle <= 13, "nothing runs although somebody waits"
    assert run.num_free == num_blocks


# One whose last token is being computed, and one that has a part of its prompt left: with blocks
# for that, and without.
@example((4, Limits(1, 2, 2, True, 0), [Asked(prompt=1, output=1), Asked(3, 1)]), [True])
@example((5, Limits(1, 2, 2, True, 0), [Asked(prompt=1, output=2), Asked(4, 1)]), [True])
@given(settings_and_requests(), st.lists(st.booleans(), min_size=1, max_size=9))
def test_steps_that_are_decided_ahead_are_the_models_too(
    case: tuple[int, Limits, list[Asked]], ahead: list[bool]
) -> None:
    num_blocks, limits, requests = case
    run, model = beside(case)
    memory, sequences, queues = run.memory, run.sequences, run.queues
    plan, next_plan = run.plan, scheduler.make_plan(limits.max_num_seqs, run.plan.found.size)
    is_under_way = False
    arrived = step = 0
    while not run.is_over:
        assert step < 1_000, "somebody waits for ever"
        while arrived < len(requests) and requests[arrived].arrives <= step:
            queue.push_back(sequences, queues, run.lead_of[arrived])
            model.arrive(run.lead_of[arrived])
            arrived += 1
        if not is_under_way:
            scheduler.schedule(memory, sequences, queues, plan, limits)
            assert _computes(plan) == model.schedule().computes
        scheduler.anticipate(memory, sequences, queues, plan)
        model.anticipate()
        has_room = scheduler.has_room_ahead(memory, sequences, queues, limits.block_size)
        assert has_room == model.has_room_ahead()
        is_under_way = False
        if has_room and ahead[step % len(ahead)]:
            scheduler.schedule(memory, sequences, queues, next_plan, limits)
            expected = model.schedule()
            assert _computes(next_plan) == expected.computes
            assert next_plan.counters[PREEMPTED] == 0 and not expected.preempted
            assert next_plan.counters[COPIES] == expected.num_copies
            is_under_way = bool(expected.computes)
        assert broken_laws(memory, limits.block_size) == []
        scheduler.commit(memory, sequences, queues, plan, limits)
        n = int(plan.counters[SCHEDULED])
        sampled, forked = model.conclude()
        assert sorted(plan.sequence[:n][plan.samples[:n]].tolist()) == sampled
        assert plan.forked[: plan.counters[FORKED]].tolist() == forked
        done = [s for s in run.running if sequences.num_tokens[s] >= sequences.total_tokens[s]]
        assert done == model.drop_done()
        for s in done:
            scheduler.finish(memory, sequences, s, limits.block_size)
        queue.drop_finished(sequences, queues)
        run.done += done
        assert broken_laws(memory, limits.block_size) == []
        _check_blocks(run, model)
        assert run.waiting == [s.number for s in model.waiting]
        if is_under_way:
            plan, next_plan = next_plan, plan
        step += 1
    assert run.num_free == num_blocks


def _computes(plan: scheduler.Plan) -> list[tuple[int, int, int]]:
    n = int(plan.counters[SCHEDULED])
    columns = (plan.sequence, plan.start, plan.num_new)
    return list(zip(*(column[:n].tolist() for column in columns)))


def _check_blocks(run: ScheduledRun, model: SchedulerModel) -> None:
    assert run.num_free == model.num_free()
    assert run.running == [s.number for s in model.running]
