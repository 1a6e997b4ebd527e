"""What a scheduler decided in each step, told alike for the engine's and for the simulator's."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pagedkv.memory.allocation import Memory
from pagedkv.memory.blocks import PUBLISHED
from pagedkv.scheduling.continuous import Batch, Scheduler
from pagedkv.scheduling.queues import RUNNING_SIZE, WAITING_HEAD, WAITING_SIZE, Queues
from pagedkv.scheduling.scheduler import ADMITTED, COPIES, PREEMPTED, SCHEDULED
from pagedkv.simulate.run import STEPS
from pagedkv.simulate.simulator import PagedReplay

Keys = dict[tuple[int, int], int]
"""A number for each key, by first appearance: secrets differ, who is equal to whom must not."""


@dataclass
class Decided:
    """One step, and the memory after it; sequences are rows of the trace."""

    computes: list[tuple[int, int, int]]  # sequence, tokens before, new tokens
    admitted: list[tuple[int, int]]  # sequence, cached tokens
    preempted: list[int]
    copies: list[tuple[int, int]]
    running: list[int]
    waiting: list[int]
    tables: list[list[int]]  # of the running ones
    ref_count: list[int]
    free_list: list[int]  # in the order in which blocks will be handed out
    keys: list[int]  # of each block, -1 where it has none that can be found


def engine_decided(scheduler: Scheduler, batch: Batch, rows: dict[int, int], keys: Keys) -> Decided:
    """`rows` is the row of the trace of each sequence's number."""
    before = batch.positions[batch.query_starts[:-1]].tolist() if len(batch.sequences) else []
    new = np.diff(batch.query_starts).tolist()

    def row_of(column: int) -> int:
        return rows[int(scheduler._numbers(np.array([column]))[0])]

    return _after(
        scheduler._memory,
        scheduler._queues,
        scheduler._sequences.row,
        row_of,
        keys,
        computes=list(zip([rows[s] for s in batch.sequences.tolist()], before, new)),
        admitted=[(rows[s], n) for s, n in zip(batch.admitted.tolist(), batch.num_cached.tolist())],
        preempted=[rows[s] for s in batch.preempted.tolist()],
        copies=[(a, b) for a, b in batch.copies.tolist()],
    )


def replay_decided(replay: PagedReplay, keys: Keys) -> Decided | None:
    """Replay one step, after the idle time before it; None when all is over."""
    num_steps = int(replay.run.totals[STEPS])
    while int(replay.run.totals[STEPS]) == num_steps:
        if replay.advance(1):
            return None
    plan = replay.plan
    n = plan.counters.tolist()
    return _after(
        replay.memory,
        replay.queues,
        replay.sequences.row,
        int,
        keys,
        computes=list(
            zip(
                plan.sequence[: n[SCHEDULED]].tolist(),
                plan.start[: n[SCHEDULED]].tolist(),
                plan.num_new[: n[SCHEDULED]].tolist(),
            )
        ),
        admitted=list(
            zip(plan.admitted[: n[ADMITTED]].tolist(), plan.num_cached[: n[ADMITTED]].tolist())
        ),
        preempted=plan.preempted[: n[PREEMPTED]].tolist(),
        copies=[(a, b) for a, b in plan.copies[: n[COPIES]].tolist()],
    )


def _after(memory: Memory, queues: Queues, row_of_table, row_of, keys: Keys, **decided) -> Decided:
    pool = memory.pool
    head, size = int(queues.counters[WAITING_HEAD]), int(queues.counters[WAITING_SIZE])
    waiting = [int(queues.waiting[(head + i) % len(queues.waiting)]) for i in range(size)]
    running = queues.running[: queues.counters[RUNNING_SIZE]].tolist()
    tables = [memory.tables.entries[row_of_table[s]] for s in running]
    ends = len(pool.ref_count)
    free_list, block = [], int(pool.next_free[ends])
    while block != ends:
        free_list.append(block)
        block = int(pool.next_free[block])
    of_blocks = [
        keys.setdefault((int(key[0]), int(key[1])), len(keys)) if state == PUBLISHED else -1
        for key, state in zip(pool.key, pool.key_state)
    ]
    return Decided(
        **decided,
        running=[row_of(s) for s in running],
        waiting=[row_of(s) for s in waiting],
        tables=[[int(b) for b in table if b >= 0] for table in tables],
        ref_count=pool.ref_count.tolist(),
        free_list=free_list,
        keys=of_blocks,
    )
