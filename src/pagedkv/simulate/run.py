"""What every scheme's replay shares: the clock, arrivals, the cost of a step, what requests saw."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pagedkv.compiling import compiled_in_place
from pagedkv.scheduling import queues as queue
from pagedkv.scheduling.queues import RUNNING_SIZE, WAITING_SIZE, Queues, Sequences
from pagedkv.scheduling.scheduler import ADMITTED, FORKED, PREEMPTED, SCHEDULED, Plan
from pagedkv.scheduling.step_work import step_work
from pagedkv.simulate.step_time import step_time_s
from pagedkv.simulate.trace import Interruptions

NEXT_ARRIVAL, STEPS, FINISHED_COUNT, OUTPUT_TOKENS, PEAK_RUNNING = 0, 1, 2, 3, 4
PREEMPTIONS, RECOMPUTED, QUERIES_FIRST, HITS_FIRST, QUERIES_ALL, HITS_ALL = 5, 6, 7, 8, 9, 10
NEXT_CANCELLED, NEXT_FAILED = 11, 12
"""Places in `Run.totals`. Queries and hits are tokens: of first admissions, and of all."""

NOW_S, HORIZON_S = 0, 1
"""Places in `Run.clock`."""


class Run(NamedTuple):
    """The progress of one replay."""

    arrival_s: NDArray[np.float64]  # [sequences]
    refused: NDArray[np.bool_]  # [sequences]
    follows: NDArray[np.bool_]  # [sequences], begins by forking and does not arrive itself
    first_token_s: NDArray[np.float64]  # [sequences], NaN until then
    finish_s: NDArray[np.float64]  # [sequences], NaN until then
    lost: NDArray[np.int64]  # [sequences], computed tokens given up at the last preemption
    step_time: NDArray[np.float64]  # see step_time.StepTime
    cancelled: NDArray[np.int64]  # [k], sequences that leave, in this order
    cancelled_s: NDArray[np.float64]  # [k], when
    failed: NDArray[np.int64]  # [j], sequences that end with a step that fails
    failed_s: NDArray[np.float64]  # [j], when that begins
    clock: NDArray[np.float64]  # [2]
    totals: NDArray[np.int64]  # [13]


def make_run(
    arrival_s: NDArray[np.float64],
    refused: NDArray[np.bool_],
    follows: NDArray[np.bool_],
    step_time: NDArray[np.float64],
    *,
    horizon_s: float,
    interruptions: Interruptions | None = None,
) -> Run:
    """A replay at time 0 that ends when all is done, or at `horizon_s`."""
    n = len(arrival_s)
    cut = Interruptions() if interruptions is None else interruptions
    return Run(
        arrival_s=arrival_s,
        refused=refused,
        follows=follows,
        first_token_s=np.full(n, np.nan),
        finish_s=np.full(n, np.nan),
        lost=np.zeros(n, dtype=np.int64),
        step_time=step_time,
        cancelled=cut.cancelled,
        cancelled_s=cut.cancelled_s,
        failed=cut.failed,
        failed_s=cut.failed_s,
        clock=np.array([0.0, horizon_s]),
        totals=np.zeros(13, dtype=np.int64),
    )


@compiled_in_place
def next_work_s(run: Run, sequences: Sequences, queues: Queues) -> float:
    """Let everybody arrive who has by now, and tell when to go on: now, later, or never (inf).

    A sequence that is refused does not arrive. Idle time ends at the horizon at the latest.
    """
    i = run.totals[NEXT_ARRIVAL]
    now_s = float(run.clock[NOW_S])
    while i < len(run.arrival_s) and run.arrival_s[i] <= now_s:
        if not run.refused[i] and not run.follows[i]:
            queue.push_back(sequences, queues, i)
        i += 1
    run.totals[NEXT_ARRIVAL] = i
    if now_s >= run.clock[HORIZON_S]:
        return np.inf
    if queues.counters[RUNNING_SIZE] + queues.counters[WAITING_SIZE] > 0:
        return now_s
    while i < len(run.arrival_s) and (run.refused[i] or run.follows[i]):
        i += 1
    if i == len(run.arrival_s):
        return np.inf
    return min(float(run.arrival_s[i]), float(run.clock[HORIZON_S]))


@compiled_in_place
def next_to_leave(run: Run) -> tuple[int, int]:
    """The range of `run.cancelled` that leaves now."""
    first = int(run.totals[NEXT_CANCELLED])
    stop = first
    while stop < len(run.cancelled) and run.cancelled_s[stop] <= run.clock[NOW_S]:
        stop += 1
    run.totals[NEXT_CANCELLED] = stop
    return first, stop


@compiled_in_place
def next_to_fail(run: Run) -> tuple[int, int]:
    """The range of `run.failed` that ends with the step that begins now; empty if it succeeds."""
    first = int(run.totals[NEXT_FAILED])
    stop = first
    while stop < len(run.failed) and run.failed_s[stop] <= run.clock[NOW_S]:
        stop += 1
    run.totals[NEXT_FAILED] = stop
    return first, stop


@compiled_in_place
def duration_s(run: Run, plan: Plan, num_running: int) -> float:
    """How long the planned step takes."""
    prefill, decode, context, pairs = step_work(plan.start, plan.num_new, plan.counters[SCHEDULED])
    return step_time_s(run.step_time, prefill, decode, context, pairs, num_running)


@compiled_in_place
def note_plan(run: Run, sequences: Sequences, queues: Queues, plan: Plan) -> None:
    """Count what the plan decided."""
    totals = run.totals
    totals[STEPS] += 1
    totals[PEAK_RUNNING] = max(totals[PEAK_RUNNING], queues.counters[RUNNING_SIZE])
    for i in range(plan.counters[PREEMPTED]):
        totals[PREEMPTIONS] += 1
        run.lost[plan.preempted[i]] = plan.num_lost[i]
    for i in range(plan.counters[ADMITTED]):
        s = plan.admitted[i]
        totals[QUERIES_ALL] += sequences.num_tokens[s]
        totals[HITS_ALL] += plan.num_cached[i]
        if sequences.num_admissions[s] == 1:
            totals[QUERIES_FIRST] += sequences.num_tokens[s]
            totals[HITS_FIRST] += plan.num_cached[i]
        totals[RECOMPUTED] += max(run.lost[s] - plan.num_cached[i], 0)
        run.lost[s] = 0


@compiled_in_place
def note_tokens(run: Run, sequences: Sequences, plan: Plan) -> None:
    """At the end of a step, note who got a token, and for whom it was the first or the last."""
    for i in range(plan.counters[SCHEDULED]):
        if plan.samples[i]:
            _note_token(run, sequences, plan.sequence[i])
    for i in range(plan.counters[FORKED]):
        _note_token(run, sequences, plan.forked[i])


@compiled_in_place
def is_done(sequences: Sequences, s: int) -> bool:
    """Whether `s` has all of its tokens."""
    return bool(sequences.num_tokens[s] >= sequences.total_tokens[s])


@compiled_in_place
def _note_token(run: Run, sequences: Sequences, s: int) -> None:
    run.totals[OUTPUT_TOKENS] += 1
    if np.isnan(run.first_token_s[s]):
        run.first_token_s[s] = run.clock[NOW_S]
    if is_done(sequences, s):
        run.finish_s[s] = run.clock[NOW_S]
        run.totals[FINISHED_COUNT] += 1
