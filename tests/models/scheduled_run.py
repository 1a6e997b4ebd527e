"""The compiled scheduler driven one step at a time, everything it decided told in plain Python."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagedkv.memory.allocation import make_memory
from pagedkv.memory.blocks import EVICTED, FREE
from pagedkv.memory.laws import broken_laws
from pagedkv.scheduling import queues as queue
from pagedkv.scheduling import scheduler
from pagedkv.scheduling.limits import Limits
from pagedkv.scheduling.queues import BLOCKED, RUNNING_SIZE, WAITING_HEAD, WAITING_SIZE
from pagedkv.scheduling.scheduler import ADMITTED, COPIES, FORKED, PREEMPTED, SCHEDULED


@dataclass(frozen=True)
class Asked:
    """One request: `keys` are, for each sample, those of its blocks, prompt and output."""

    prompt: int
    output: int
    samples: int = 1
    arrives: int = 0  # before this step
    keys: tuple[tuple[int, ...], ...] = ()


@dataclass
class Told:
    """One step: what was decided, and what came of it."""

    computes: list[tuple[int, int, int]]  # sequence, tokens before, new tokens
    admitted: list[tuple[int, int]]  # sequence, cached tokens
    preempted: list[tuple[int, int]]  # sequence, computed tokens that it lost
    copies: list[tuple[int, int]]
    sampled: list[int]
    forked: list[int]
    done: list[int]


class ScheduledRun:
    """Requests on a memory; sequences are numbered request after request, sample after sample."""

    def __init__(
        self, requests: list[Asked], num_blocks: int, limits: Limits, *, shortcut: bool = True
    ) -> None:
        self.requests = requests
        self.limits = limits
        self.block_size = limits.block_size
        self.shortcut = shortcut
        samples = [(r, j) for r in requests for j in range(r.samples)]
        prompt = np.array([r.prompt for r, _ in samples], dtype=np.int64)
        total = prompt + np.array([r.output for r, _ in samples], dtype=np.int64)
        followers = [r.samples - 1 if j == 0 else 0 for r, j in samples]
        of_sample = [r.keys[j] if r.keys else () for r, j in samples]
        num_keys = np.array([len(keys) for keys in of_sample], dtype=np.int64)
        keys = [(key, key) for keys in of_sample for key in keys]
        self.sequences = queue.make_sequences(
            prompt,
            total,
            num_followers=np.array(followers, dtype=np.int64),
            first_key=np.cumsum(num_keys) - num_keys,
            num_keys=num_keys,
            keys=np.array(keys, dtype=np.uint64).reshape(-1, 2),
        )
        width = max(self.blocks_of(int(t) - 1) for t in total)
        self.memory = make_memory(num_blocks, limits.max_num_seqs, width)
        self.queues = queue.make_queues(len(samples), limits.max_num_seqs)
        self.plan = scheduler.make_plan(limits.max_num_seqs, width)
        self.num_steps = 0
        self.done: list[int] = []

    def blocks_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    @property
    def lead_of(self) -> dict[int, int]:
        """Request -> its first sequence."""
        first = np.cumsum([0, *(r.samples for r in self.requests)])
        return {i: int(first[i]) for i in range(len(self.requests))}

    @property
    def num_free(self) -> int:
        return int(self.memory.pool.counters[FREE])

    @property
    def num_evicted(self) -> int:
        return int(self.memory.pool.counters[EVICTED])

    @property
    def running(self) -> list[int]:
        return self.queues.running[: self.queues.counters[RUNNING_SIZE]].tolist()

    @property
    def waiting(self) -> list[int]:
        head, size = self.queues.counters[WAITING_HEAD], self.queues.counters[WAITING_SIZE]
        ring: NDArray[np.int64] = self.queues.waiting
        return [int(ring[(head + i) % len(ring)]) for i in range(size)]

    @property
    def is_over(self) -> bool:
        return len(self.done) == len(self.sequences.state)

    def step(self, between: Callable[[], None] = lambda: None) -> Told:
        """Let arrive who is due, schedule, call `between`, commit, and end who is done."""
        for i, request in enumerate(self.requests):
            if request.arrives == self.num_steps:
                queue.push_back(self.sequences, self.queues, self.lead_of[i])
        self.num_steps += 1
        if not self.shortcut:
            self.queues.counters[BLOCKED] = -1
        plan, memory, sequences = self.plan, self.memory, self.sequences
        scheduler.schedule(memory, sequences, self.queues, plan, self.limits)
        assert broken_laws(memory, self.block_size) == []
        between()
        scheduler.commit(memory, sequences, self.queues, plan, self.limits)
        assert broken_laws(memory, self.block_size) == []
        n = plan.counters.tolist()
        done = [s for s in self.running if sequences.num_tokens[s] >= sequences.total_tokens[s]]
        told = Told(
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
            preempted=list(
                zip(plan.preempted[: n[PREEMPTED]].tolist(), plan.num_lost[: n[PREEMPTED]].tolist())
            ),
            copies=[tuple(pair) for pair in plan.copies[: n[COPIES]].tolist()],
            sampled=plan.sequence[: n[SCHEDULED]][plan.samples[: n[SCHEDULED]]].tolist(),
            forked=plan.forked[: n[FORKED]].tolist(),
            done=done,
        )
        for s in done:
            scheduler.finish(memory, sequences, s, self.block_size)
        queue.drop_finished(sequences, self.queues)
        assert broken_laws(memory, self.block_size) == []
        self.done += done
        return told

    def steps(self, at_most: int) -> list[Told]:
        """Steps until all is done; fails where that takes more than `at_most`."""
        told = []
        while not self.is_over:
            assert self.num_steps < at_most, f"{self.waiting} wait and {self.running} run for ever"
            told.append(self.step())
        return told
