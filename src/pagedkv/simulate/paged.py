"""The paged scheme: the engine's scheduler on the engine's memory, without the model."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pagedkv.compiling import compiled_in_place
from pagedkv.memory.allocation import Memory
from pagedkv.memory.block_table import blocks_for
from pagedkv.memory.blocks import CACHED, FREE, PUBLISHED
from pagedkv.scheduling import scheduler
from pagedkv.scheduling.limits import Limits
from pagedkv.scheduling.queues import FINISHED, RUNNING_SIZE, WAITING_SIZE, Queues, Sequences
from pagedkv.scheduling.scheduler import Plan
from pagedkv.simulate import observation as observed
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
from pagedkv.simulate.run import NOW_S, Run


@compiled_in_place
def replay(
    memory: Memory,
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

    `slots` float64 [6] is scratch.
    """
    for _ in range(max_steps):
        now_s = run.clock[NOW_S]
        start_s = running.next_work_s(run, sequences, queues)
        if _let_leave(memory, sequences, queues, run, limits.block_size):
            start_s = running.next_work_s(run, sequences, queues)
        if start_s == np.inf:
            return True
        if start_s > now_s:
            _count_slots(memory, sequences, queues, limits.block_size, slots)
            observed.observe(observation, now_s, start_s, slots, 0, 0)
            run.clock[NOW_S] = start_s
            continue
        scheduler.schedule(memory, sequences, queues, plan, limits)
        num_running = queues.counters[RUNNING_SIZE]
        running.note_plan(run, sequences, queues, plan)
        end_s = now_s + running.duration_s(run, plan, num_running)

        entries = _count_slots(memory, sequences, queues, limits.block_size, slots)
        observation.entries[0] += (end_s - now_s) * entries
        observation.entries[1] += (end_s - now_s) * (
            len(memory.pool.ref_count) - memory.pool.counters[FREE]
        )
        observed.observe(
            observation, now_s, end_s, slots, num_running, queues.counters[WAITING_SIZE]
        )
        if observed.is_snapshot_due(observation, now_s):
            _draw_map(memory, observation, now_s)

        first, stop = running.next_to_fail(run)
        run.clock[NOW_S] = end_s
        if stop > first:
            scheduler.end(memory, sequences, queues, run.failed[first:stop], limits.block_size)
            continue
        scheduler.commit(memory, sequences, queues, plan, limits)
        running.note_tokens(run, sequences, plan)
        _finish(memory, sequences, queues, limits.block_size)
    return False


@compiled_in_place
def _let_leave(
    memory: Memory, sequences: Sequences, queues: Queues, run: Run, block_size: int
) -> bool:
    """Whose clients go away now end, one after the other; whether there were any.

    Those of one request left together, in the order in which they ran; that is the order of its
    samples, which always stand in it, waiting and running.
    """
    first, stop = running.next_to_leave(run)
    for i in range(first, stop):
        scheduler.end(memory, sequences, queues, run.cancelled[i : i + 1], block_size)
    return stop > first


@compiled_in_place
def _finish(memory: Memory, sequences: Sequences, queues: Queues, block_size: int) -> None:
    """Who has all of its tokens ends."""
    any_done = False
    for i in range(queues.counters[RUNNING_SIZE]):
        s = queues.running[i]
        if running.is_done(sequences, s):
            sequences.state[s] = FINISHED
            any_done = True
    if any_done:
        scheduler.drop_finished(memory, sequences, queues, block_size)


@compiled_in_place
def _count_slots(
    memory: Memory,
    sequences: Sequences,
    queues: Queues,
    block_size: int,
    slots: NDArray[np.float64],
) -> int:
    """Count the slots of each kind; returns the block-table entries in use.

    Only a last block has slots without a token. It has one user: a sequence that forks writes in
    the next step, as those that forked from it do, and each but one copies the block for that.
    """
    pool, tables = memory.pool, memory.tables
    entries, reserved, never_used = 0, 0, 0
    for i in range(queues.counters[RUNNING_SIZE]):
        s = queues.running[i]
        row = sequences.row[s]
        held = tables.num_tokens[row]
        num_blocks = blocks_for(held, block_size)
        entries += num_blocks
        empty = num_blocks * block_size - held
        if empty > 0:
            to_come = min(empty, sequences.total_tokens[s] - 1 - held)
            reserved += to_come
            never_used += empty - to_come
    free, cached = pool.counters[FREE], pool.counters[CACHED]
    slots[TOKEN_STATES] = (len(pool.ref_count) - free) * block_size - reserved - never_used
    slots[RESERVED] = reserved
    slots[NEVER_USED] = never_used
    slots[UNUSABLE] = 0.0
    slots[CACHED_KIND] = cached * block_size
    slots[FREE_KIND] = (free - cached) * block_size
    return entries


@compiled_in_place
def _draw_map(memory: Memory, observation: Observation, now_s: float) -> None:
    pool = memory.pool
    num_blocks = len(pool.ref_count)
    for block in range(num_blocks):
        if pool.ref_count[block] > 0:
            kind = TOKEN_STATES
            if pool.ref_count[block] > 1:
                observed.count_slots(observation, 6, block, block + 1, num_blocks)
        elif pool.key_state[block] == PUBLISHED:
            kind = CACHED_KIND
        else:
            kind = FREE_KIND
        observed.count_slots(observation, kind, block, block + 1, num_blocks)
    observed.take_snapshot(observation, now_s)
