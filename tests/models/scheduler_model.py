"""The scheduler without prefix caching, slow and obvious: lists and sets, nothing carried along.

The rules are those of the docstring of `pagedkv.scheduling.scheduler`. A block is a number that
has never been used before; how many are free is counted anew each time. What a running step
computes counts as computed from `anticipate` on: what it is, this model does not know anyway.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class ModelSequence:
    number: int
    prompt: int
    total: int
    followers: int = 0
    tokens: int = 0  # that exist
    computed: int = 0
    blocks: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokens = self.prompt

    @property
    def uncomputed(self) -> int:
        return self.tokens - self.computed

    @property
    def followers_to_come(self) -> int:
        return self.followers if self.tokens == self.prompt else 0


@dataclass
class ModelStep:
    computes: list[tuple[int, int, int]]  # sequence, tokens before, new tokens
    admitted: list[int]
    preempted: list[tuple[int, int]]  # sequence, computed tokens that it lost
    num_copies: int


@dataclass
class SchedulerModel:
    sequences: list[ModelSequence]
    num_blocks: int
    block_size: int
    max_num_seqs: int
    budget: int
    chunked: bool
    watermark_blocks: int
    waiting: list[ModelSequence] = field(default_factory=list)
    running: list[ModelSequence] = field(default_factory=list)
    blocks_made: int = 0

    def arrive(self, number: int) -> None:
        self.waiting.append(self.sequences[number])

    def schedule(self) -> ModelStep:
        self.planned: dict[int, int] = {}  # sequence -> new tokens, in order
        self.admitted: list[int] = []
        self.preempted: list[tuple[int, int]] = []
        self.num_copies = 0
        self.left = self.budget

        for s in list(self.running):
            if s in self.running and s.uncomputed == 1:
                while s in self.running and self.blocks_wanted(s, 1) > self.num_free():
                    self.preempt_youngest()
                if s in self.running:
                    self.compute(s, 1)

        for s in self.running:
            if s.number not in self.planned and s.uncomputed > 0:
                num_new = min(s.uncomputed, self.left)
                if num_new == 0 or self.blocks_wanted(s, num_new) > self.num_free():
                    break
                self.compute(s, num_new)

        # With nothing left to compute one ends when the running step has, and makes room.
        moves = self.planned or not self.running or any(s.uncomputed == 0 for s in self.running)
        assert moves, "somebody runs, but nothing moves"
        assert sum(s.computed > 0 and s.uncomputed > 1 for s in self.running) <= 1
        while self.waiting and not self.preempted and self.left > 0:
            if not self.admit(self.waiting[0]):
                break
        return ModelStep(
            [(n, self.sequences[n].computed, new) for n, new in self.planned.items()],
            self.admitted,
            self.preempted,
            self.num_copies,
        )

    def admit(self, s: ModelSequence) -> bool:
        group = 1 + s.followers_to_come
        seats_taken = sum(1 + r.followers_to_come for r in self.running)
        if seats_taken + group > self.max_num_seqs:
            return False
        room = self.num_free() - self.num_promised()
        if self.running:
            room -= self.watermark_blocks
        if self.blocks_of(s.tokens) > room:
            return False
        num_new = s.tokens
        if num_new > self.left:
            if self.chunked:
                num_new = self.left
            elif self.planned:
                return False
        self.waiting.remove(s)
        self.running.append(s)
        self.admitted.append(s.number)
        self.compute(s, num_new)
        return True

    def num_promised(self) -> int:
        """Blocks that running prompts have not taken yet, and one for each follower to come."""
        return sum(
            self.blocks_of(r.tokens) - len(r.blocks) + r.followers_to_come for r in self.running
        )

    def compute(self, s: ModelSequence, num_new: int) -> None:
        if s.computed % self.block_size and self.users(s.blocks[-1]) > 1:
            s.blocks[-1] = self.make_block()
            self.num_copies += 1
        while len(s.blocks) < self.blocks_of(s.computed + num_new):
            s.blocks.append(self.make_block())
        assert self.num_free() >= 0
        self.planned[s.number] = num_new
        self.left = max(self.left - num_new, 0)

    def preempt_youngest(self) -> None:
        s = self.running.pop()
        assert s.number not in self.planned
        self.preempted.append((s.number, s.computed))
        s.computed = 0
        s.blocks = []
        self.waiting.insert(0, s)

    def has_room_ahead(self) -> bool:
        """Whether all that need one token have room for it without anybody giving way."""
        return sum(self.blocks_wanted(s, 1) for s in self.running if s.uncomputed == 1) <= (
            self.num_free()
        )

    def anticipate(self) -> None:
        """Count what the running step brings, last tokens excepted."""
        self.coming = []
        self.came = []
        for number, num_new in self.planned.items():
            s = self.sequences[number]
            s.computed += num_new
            if s.uncomputed == 0 and s.tokens + 1 < s.total:
                self.coming.append(number)
                self.came += self.count_token(s)
        self.last = [n for n in self.planned if self.sequences[n].uncomputed == 0]

    def conclude(self) -> tuple[list[int], list[int]]:
        """`commit` of a step that was anticipated: now its last tokens are there too."""
        forked = list(self.came)
        for number in self.last:
            forked += self.count_token(self.sequences[number])
        return sorted(self.coming + self.last), forked

    def count_token(self, s: ModelSequence) -> list[int]:
        """`s` has one more; returns those that fork from it."""
        followers = self.sequences[s.number + 1 : s.number + 1 + s.followers_to_come]
        for f in followers:
            f.tokens = f.prompt + 1
            f.computed = s.computed
            f.blocks = list(s.blocks)
            self.running.append(f)
        s.tokens += 1
        return [f.number for f in followers]

    def commit(self) -> tuple[list[int], list[int]]:
        """Who has a new token, and who began by forking."""
        sampled, forked = [], []
        for number, num_new in self.planned.items():
            s = self.sequences[number]
            s.computed += num_new
            if s.uncomputed == 0:
                sampled.append(number)
                forked += self.count_token(s)
        return sampled, forked

    def drop_done(self) -> list[int]:
        done = [s for s in self.running if s.tokens >= s.total]
        for s in done:
            s.blocks = []
        self.running = [s for s in self.running if s not in done]
        return [s.number for s in done]

    def blocks_of(self, num_tokens: int) -> int:
        return len(range(0, num_tokens, self.block_size))

    def blocks_wanted(self, s: ModelSequence, num_new: int) -> int:
        wanted = self.blocks_of(s.computed + num_new) - len(s.blocks)
        if s.computed % self.block_size and self.users(s.blocks[-1]) > 1:
            wanted += 1
        return wanted

    def users(self, block: int) -> int:
        return sum(block in s.blocks for s in self.running)

    def num_free(self) -> int:
        return self.num_blocks - len({block for s in self.running for block in s.blocks})

    def make_block(self) -> int:
        self.blocks_made += 1
        return self.blocks_made
