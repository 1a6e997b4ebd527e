"""The contiguous schemes: a region for each request, reserved when it is admitted.

The same order, seats and token budget as the paged scheme: decodes first, then prompts, then
admission first come first served. What differs is the memory. A region is as long as the scheme
says when its request is admitted, so nothing ever grows, and nobody has to give way; a request
whose region fits into no hole waits, and all behind it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pagedkv.compiling import compiled_in_place
from pagedkv.scheduling import queues as queue
from pagedkv.scheduling.limits import Limits
from pagedkv.scheduling.queues import (
    FINISHED,
    RUNNING_SIZE,
    WAITING_HEAD,
    WAITING_SIZE,
    Queues,
    Sequences,
)
from pagedkv.scheduling.scheduler import ADMITTED, SCHEDULED, Plan
from pagedkv.simulate import observation as observed
from pagedkv.simulate import regions as placement
from pagedkv.simulate import run as running
from pagedkv.simulate.observation import (
    CACHED_KIND,
    FREE_KIND,
    NEVER_USED,
    RESERVED,
    TOKEN_STATES,
    UNUSABLE,
    Observation,
)
from pagedkv.simulate.regions import GRANTED_SLOTS, NUM_SLOTS, Regions
from pagedkv.simulate.run import NOW_S, Run


@compiled_in_place
def replay(
    regions: Regions,
    policy: int,
    region_tokens: NDArray[np.int64],
    num_computed: NDArray[np.int64],
    sequences: Sequences,
    queues: Queues,
    plan: Plan,
    limits: Limits,
    run: Run,
    observation: Observation,
    slots: NDArray[np.float64],
    max_steps: int,
) -> bool:
    """Replay up to `max_steps` steps; True when there is nothing left to do.

    `region_tokens` int64 [sequences] is what each reserves; `num_computed` int64 [sequences] is
    kept here; a sequence's `row` is the first slot of its region. `slots` float64 [6] is scratch.
    """
    for _ in range(max_steps):
        now_s = run.clock[NOW_S]
        start_s = running.next_work_s(run, sequences, queues)
        if start_s == np.inf:
            return True
        if start_s > now_s:
            _count_slots(regions, region_tokens, num_computed, sequences, queues, False, slots)
            observed.observe(observation, now_s, start_s, slots, 0, 0)
            run.clock[NOW_S] = start_s
            continue
        is_blocked = _schedule(
            regions, policy, region_tokens, num_computed, sequences, queues, plan, limits
        )
        num_running = queues.counters[RUNNING_SIZE]
        running.note_plan(run, sequences, queues, plan)
        end_s = now_s + running.duration_s(run, plan, num_running)

        _count_slots(regions, region_tokens, num_computed, sequences, queues, is_blocked, slots)
        observed.observe(
            observation, now_s, end_s, slots, num_running, queues.counters[WAITING_SIZE]
        )
        if observed.is_snapshot_due(observation, now_s):
            _draw_map(
                regions, region_tokens, num_computed, sequences, queues, is_blocked, observation
            )
            observed.take_snapshot(observation, now_s)

        run.clock[NOW_S] = end_s
        for i in range(plan.counters[SCHEDULED]):
            s = plan.sequence[i]
            plan.samples[i] = num_computed[s] == sequences.num_tokens[s]
            if plan.samples[i]:
                sequences.num_tokens[s] += 1
        running.note_tokens(run, sequences, plan)
        _finish(regions, sequences, queues, plan)
    return False


@compiled_in_place
def _schedule(
    regions: Regions,
    policy: int,
    region_tokens: NDArray[np.int64],
    num_computed: NDArray[np.int64],
    sequences: Sequences,
    queues: Queues,
    plan: Plan,
    limits: Limits,
) -> bool:
    """Decide the next step; True where the first request that waits fits into no hole."""
    plan.counters[:] = 0
    budget = limits.max_num_batched_tokens
    for i in range(queues.counters[RUNNING_SIZE]):
        s = queues.running[i]
        if sequences.num_tokens[s] - num_computed[s] == 1:
            _compute(num_computed, plan, s, 1)
            budget -= 1
    for i in range(queues.counters[RUNNING_SIZE]):
        s = queues.running[i]
        num_new = min(sequences.num_tokens[s] - num_computed[s], budget)
        if num_new > 0:
            _compute(num_computed, plan, s, num_new)
            budget -= num_new
    while (
        queues.counters[WAITING_SIZE] > 0
        and budget > 0
        and queues.counters[RUNNING_SIZE] < limits.max_num_seqs
    ):
        s = queues.waiting[queues.counters[WAITING_HEAD]]
        num_new = min(sequences.num_tokens[s], budget)
        if num_new < sequences.num_tokens[s] and not limits.chunked_prefill:
            if plan.counters[SCHEDULED] > 0:
                break
            num_new = sequences.num_tokens[s]
        start = placement.place(regions, policy, region_tokens[s])
        if start < 0:
            return True
        sequences.row[s] = start
        queue.start_first(sequences, queues)
        plan.admitted[plan.counters[ADMITTED]] = s
        plan.num_cached[plan.counters[ADMITTED]] = 0
        plan.counters[ADMITTED] += 1
        _compute(num_computed, plan, s, num_new)
        budget = max(budget - num_new, 0)
    if queues.counters[WAITING_SIZE] == 0:
        return False
    s = queues.waiting[queues.counters[WAITING_HEAD]]  # it waits for tokens or for a seat
    return not placement.would_fit(regions, policy, region_tokens[s])


@compiled_in_place
def _compute(num_computed: NDArray[np.int64], plan: Plan, s: int, num_new: int) -> None:
    place = plan.counters[SCHEDULED]
    plan.sequence[place] = s
    plan.start[place] = num_computed[s]
    plan.num_new[place] = num_new
    plan.counters[SCHEDULED] += 1
    num_computed[s] += num_new


@compiled_in_place
def _finish(regions: Regions, sequences: Sequences, queues: Queues, plan: Plan) -> None:
    any_done = False
    for i in range(plan.counters[SCHEDULED]):
        s = plan.sequence[i]
        if plan.samples[i] and running.is_done(sequences, s):
            placement.remove(regions, sequences.row[s])
            sequences.state[s] = FINISHED
            any_done = True
    if any_done:
        queue.drop_finished(sequences, queues)


@compiled_in_place
def _count_slots(
    regions: Regions,
    region_tokens: NDArray[np.int64],
    num_computed: NDArray[np.int64],
    sequences: Sequences,
    queues: Queues,
    is_blocked: bool,
    slots: NDArray[np.float64],
) -> None:
    """Count the slots of each kind.

    Free memory is unusable while the first request that waits fits into no hole; what a buddy
    system rounds up is unusable always: nobody asked for it, nobody can have it.
    """
    tokens, final, asked = 0, 0, 0
    for i in range(queues.counters[RUNNING_SIZE]):
        s = queues.running[i]
        tokens += num_computed[s]
        final += sequences.total_tokens[s] - 1
        asked += region_tokens[s]
    granted = regions.totals[GRANTED_SLOTS]
    holes = regions.totals[NUM_SLOTS] - granted
    slots[TOKEN_STATES] = tokens
    slots[RESERVED] = final - tokens
    slots[NEVER_USED] = asked - final
    slots[UNUSABLE] = granted - asked + (holes if is_blocked else 0)
    slots[CACHED_KIND] = 0.0
    slots[FREE_KIND] = 0 if is_blocked else holes


@compiled_in_place
def _draw_map(
    regions: Regions,
    region_tokens: NDArray[np.int64],
    num_computed: NDArray[np.int64],
    sequences: Sequences,
    queues: Queues,
    is_blocked: bool,
    observation: Observation,
) -> None:
    num_slots = regions.totals[NUM_SLOTS]
    for i in range(queues.counters[RUNNING_SIZE]):
        s = queues.running[i]
        start = sequences.row[s]
        computed = start + num_computed[s]
        final = start + sequences.total_tokens[s] - 1
        asked = start + region_tokens[s]
        observed.count_slots(observation, TOKEN_STATES, start, computed, num_slots)
        observed.count_slots(observation, RESERVED, computed, final, num_slots)
        observed.count_slots(observation, NEVER_USED, final, asked, num_slots)
    hole = 0
    for i in range(placement.num_live(regions)):
        start = regions.start[i]
        kind = UNUSABLE if is_blocked else FREE_KIND
        observed.count_slots(observation, kind, hole, start, num_slots)
        hole = start + regions.granted[i]
        observed.count_slots(observation, UNUSABLE, start + regions.size[i], hole, num_slots)
    kind = UNUSABLE if is_blocked else FREE_KIND
    observed.count_slots(observation, kind, hole, num_slots, num_slots)
