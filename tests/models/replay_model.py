"""A trace replayed step by step in plain Python: the clock, the accounting, what requests saw.

The memory's schemes differ in a `Scheme`: the paged one is `SchedulerModel` with its blocks looked
at one by one, the contiguous ones are a row of slots in which every slot is looked at.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Protocol

from models.regions import BuddyMemory, ByteMapMemory
from models.scheduler_model import ModelSequence, ModelStep, SchedulerModel
from pagedkv.simulate.step_time import StepTime, measured_step_time

MEASURED = measured_step_time(prefill_rate_tokens_per_s=128.0, base_s=0.5, sequence_s=0.125)
COMPUTE_BOUND = StepTime("roofline", base_s=0.25, token_compute_s=1 / 64, pair_compute_s=1 / 64)
MEMORY_BOUND = StepTime("roofline", base_s=0.25, dense_weights_s=1 / 8, context_token_s=1 / 32)
ROOFLINE = StepTime(
    "roofline",
    base_s=0.25,
    token_compute_s=1 / 64,
    pair_compute_s=1 / 64,
    dense_weights_s=1 / 8,
    context_token_s=1 / 32,
)
"""Large, so that a token or a pair that is not counted is seen; for a chunk of some tokens
`ROOFLINE` waits for the arithmetic, for one token for the memory. All are sums of powers of two, so
that whatever the order of adding, an arrival is exactly at the end of a step or is not."""
STEP_TIMES = (MEASURED, COMPUTE_BOUND, MEMORY_BOUND, ROOFLINE)

Kinds = tuple[float, float, float, float, float, float]


class Scheme(Protocol):
    sequences: list[ModelSequence]
    waiting: list[ModelSequence]
    running: list[ModelSequence]

    def arrive(self, number: int) -> None: ...
    def schedule(self) -> ModelStep: ...
    def commit(self) -> tuple[list[int], list[int]]: ...
    def drop_done(self) -> list[int]: ...
    def kinds(self) -> Kinds: ...


@dataclass
class Period:
    start_s: float
    stop_s: float
    kinds: Kinds
    running: int
    waiting: int


@dataclass
class Replay:
    periods: list[Period] = field(default_factory=list)
    first_token_s: dict[int, float] = field(default_factory=dict)
    finish_s: dict[int, float] = field(default_factory=dict)
    admitted_s: dict[int, list[float]] = field(default_factory=dict)
    num_steps: int = 0
    preemptions: int = 0
    recomputed: int = 0
    output_tokens: int = 0
    now_s: float = 0.0

    @property
    def busy(self) -> list[Period]:
        return [p for p in self.periods if p.running + p.waiting > 0]

    def share(self) -> list[float]:
        """Of each kind, while requests wait or run; all is free where none ever does."""
        if not self.busy:
            return [0, 0, 0, 0, 0, 1]
        busy_s = sum(p.stop_s - p.start_s for p in self.busy)
        return [
            sum((p.stop_s - p.start_s) * p.kinds[k] / sum(p.kinds) for p in self.busy) / busy_s
            for k in range(6)
        ]

    def running_mean(self) -> float:
        if not self.busy:
            return 0.0
        busy_s = sum(p.stop_s - p.start_s for p in self.busy)
        return sum((p.stop_s - p.start_s) * p.running for p in self.busy) / busy_s


def replayed(
    scheme: Scheme,
    arrivals_s: dict[int, float],
    *,
    step_time: StepTime,
    horizon_s: float = math.inf,
) -> Replay:
    """`arrivals_s`: sequence -> when it arrives, in order, without the refused and followers."""
    r = Replay()
    to_come = list(arrivals_s)
    lost: dict[int, int] = {}
    while r.now_s < horizon_s:
        while to_come and arrivals_s[to_come[0]] <= r.now_s:
            scheme.arrive(to_come.pop(0))
        if not scheme.running and not scheme.waiting:
            if not to_come:
                break
            until = min(arrivals_s[to_come[0]], horizon_s)
            r.periods.append(Period(r.now_s, until, scheme.kinds(), 0, 0))
            r.now_s = until
            continue
        step = scheme.schedule()
        r.num_steps += 1
        r.preemptions += len(step.preempted)
        lost.update(step.preempted)
        for s in step.admitted:
            r.recomputed += lost.pop(s, 0)
        seconds = step_s(step_time, step, len(scheme.running))
        after = [(n, start + new) for n, start, new in step.computes]
        before = {n: scheme.sequences[n].computed for n, _ in after}
        for n, computed in after:  # what a step writes counts while it runs
            scheme.sequences[n].computed = computed
        r.periods.append(
            Period(
                r.now_s,
                r.now_s + seconds,
                scheme.kinds(),
                len(scheme.running),
                len(scheme.waiting),
            )
        )
        for n, computed in before.items():
            scheme.sequences[n].computed = computed
        r.now_s += seconds
        sampled, forked = scheme.commit()
        for s in sampled + forked:
            r.output_tokens += 1
            r.first_token_s.setdefault(s, r.now_s)
        for s in scheme.drop_done():
            r.finish_s[s] = r.now_s
    return r


def step_s(t: StepTime, step: ModelStep, num_running: int) -> float:
    """`docs/step-time.md`, token by token; without experts."""
    prefill = compute = 0.0
    memory = t.dense_weights_s
    for _, start, new in step.computes:
        if new > 1 or start == 0:
            prefill += new * t.prefill_token_s
        for position in range(start, start + new):
            compute += t.token_compute_s
            for _ in range(position + 1):  # itself, and every one before it
                compute += t.pair_compute_s
        for _ in range(start + new):  # read once for all tokens of the chunk
            memory += t.context_token_s
    return t.base_s + num_running * t.sequence_s + prefill + max(compute, memory)


class PagedModel(SchedulerModel):
    def kinds(self) -> Kinds:
        """Slot by slot: written, written later by one of its block's users, or never."""
        written = later = never = 0
        for block in {b for s in self.running for b in s.blocks}:
            users = [s for s in self.running if block in s.blocks]
            for offset in range(self.block_size):
                tokens = [s.blocks.index(block) * self.block_size + offset for s in users]
                if any(t < s.computed for t, s in zip(tokens, users)):
                    written += 1
                elif any(t < s.total - 1 for t, s in zip(tokens, users)):
                    later += 1
                else:
                    never += 1
        free = self.num_free() * self.block_size
        return written, later, never, 0, 0, free


@dataclass
class ContiguousModel:
    sequences: list[ModelSequence]
    region_tokens: list[int]
    num_slots: int
    placement: str
    max_num_seqs: int
    budget: int
    chunked: bool
    waiting: list[ModelSequence] = field(default_factory=list)
    running: list[ModelSequence] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.placement == "buddy":
            self.memory: BuddyMemory | ByteMapMemory = BuddyMemory(self.num_slots)
        else:
            self.memory = ByteMapMemory(self.num_slots, best=self.placement == "best-fit")
        self.start: dict[int, int] = {}

    def arrive(self, number: int) -> None:
        self.waiting.append(self.sequences[number])

    def schedule(self) -> ModelStep:
        self.planned: dict[int, int] = {}
        admitted = []
        left = self.budget
        for decodes in (True, False):
            for s in self.running:
                if (s.uncomputed == 1) == decodes and min(s.uncomputed, left) > 0:
                    self.planned[s.number] = min(s.uncomputed, left)
                    left -= self.planned[s.number]
        while self.waiting and left > 0 and len(self.running) < self.max_num_seqs:
            s = self.waiting[0]
            if s.tokens > left and not self.chunked and self.planned:
                break
            start = self.memory.place(self.region_tokens[s.number])
            if start < 0:
                break
            self.start[s.number] = start
            self.running.append(self.waiting.pop(0))
            admitted.append(s.number)
            self.planned[s.number] = min(s.tokens, left) if self.chunked else s.tokens
            left = max(left - self.planned[s.number], 0)
        return ModelStep(
            [(n, self.sequences[n].computed, new) for n, new in self.planned.items()],
            admitted,
            [],
            0,
        )

    def commit(self) -> tuple[list[int], list[int]]:
        sampled = []
        for number, num_new in self.planned.items():
            s = self.sequences[number]
            s.computed += num_new
            if s.uncomputed == 0:
                s.tokens += 1
                sampled.append(number)
        return sampled, []

    def drop_done(self) -> list[int]:
        done = [s for s in self.running if s.tokens >= s.total]
        for s in done:
            self.memory.remove(self.start.pop(s.number))
        self.running = [s for s in self.running if s not in done]
        return [s.number for s in done]

    def kinds(self) -> Kinds:
        written = later = never = rounded = 0
        for s in self.running:
            size = self.region_tokens[s.number]
            written += s.computed
            later += s.total - 1 - s.computed
            never += size - (s.total - 1)
            if self.placement == "buddy":
                granted = 1
                while granted < size:
                    granted *= 2
                rounded += granted - size
        free = self.num_slots - written - later - never - rounded
        if self.waiting:
            start = self.memory.place(self.region_tokens[self.waiting[0].number])
            if start < 0:
                return written, later, never, rounded + free, 0, 0
            self.memory.remove(start)
        return written, later, never, rounded, 0, free
