"""Whatever is called in whatever order: it is done or refused, no law breaks, and all can end."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pagedkv.errors import InvalidInput, PagedKVError, UnknownSequence
from pagedkv.scheduling.continuous import CHOSEN_LATER, Batch, Scheduler
from pagedkv.scheduling.limits import SchedulerConfig

ODD = st.sampled_from([-1, 0, 2**32, 2**63, -(2**63), 2**70, None, True, 1.5, math.nan, "x", [1]])


def mostly(usual: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """The usual, and now and then what nobody should give."""
    return st.integers(0, 49).flatmap(lambda lot: ODD if lot == 49 else usual)


TOKENS = mostly(st.lists(st.integers(0, 2), min_size=1, max_size=12))
FEW = mostly(st.integers(1, 4))


class AnyCalls(RuleBasedStateMachine):
    """A caller who gets things wrong, and goes on after each refusal."""

    def __init__(self) -> None:
        super().__init__()
        config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=9, watermark=0.0)
        self.scheduler = Scheduler(
            12, config, block_size=2, max_model_len=20, secret=bytes(range(16))
        )
        self.known: list[int] = []
        self.beams: list[list[int]] = []
        self.under_way: list[Batch] = []

    @rule(tokens=TOKENS, new=FEW, samples=FEW)
    def add(self, tokens: Any, new: Any, samples: Any) -> None:
        """A request."""
        self.attempt(
            lambda: self.known.extend(
                self.scheduler.add(tokens, max_new_tokens=new, num_samples=samples)
            )
        )

    @rule(tokens=TOKENS, new=FEW, beams=FEW)
    def search(self, tokens: Any, new: Any, beams: Any) -> None:
        """A beam search."""

        def begin() -> None:
            first = self.scheduler.add_search(tokens, max_new_tokens=new, num_beams=beams)
            self.known.append(first)
            self.beams.append([first])

        self.attempt(begin)

    @rule()
    def schedule(self) -> None:
        """A step, at any time."""
        self.attempt(lambda: self.under_way.append(self.scheduler.schedule()))

    @rule()
    def schedule_ahead(self) -> None:
        """A step ahead, at any time."""

        def ahead() -> None:
            batch = self.scheduler.schedule_ahead()
            if batch is not None:
                self.under_way.append(batch)

        self.attempt(ahead)

    @rule(num_calls=st.integers(1, 6))
    def go_on(self, num_calls: int) -> None:
        """Steps as they should be; who has said all is finished, or forgotten."""
        for _ in range(num_calls):
            if self.under_way:
                batch = self.under_way[0]
                self.scheduler.commit(self.tokens_for(batch))
                del self.under_way[0]
            else:
                self.schedule()

    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        """Tokens, of which one may be odd, or one too few."""
        if not self.under_way:
            with pytest.raises(InvalidInput):
                self.scheduler.commit([])
            return
        said: list[Any] = self.tokens_for(self.under_way[0])
        if said and data.draw(st.integers(0, 9)) == 0:
            said[0] = data.draw(ODD)
        elif data.draw(st.integers(0, 19)) == 0:
            said = said[1:]

        def end() -> None:
            self.scheduler.commit(said)
            self.under_way.pop(0)

        self.attempt(end)

    @rule()
    def abandon(self) -> None:
        """A step fails."""
        self.scheduler.abandon()
        del self.under_way[:1]

    @rule(data=st.data(), is_finished=st.booleans())
    def leave(self, data: st.DataObject, is_finished: bool) -> None:
        """Some end, who may have ended before or never have been."""
        some = st.sampled_from(self.known[-4:]) if self.known else st.just(0)
        who = data.draw(st.lists(mostly(some), min_size=1, max_size=2))
        end = self.scheduler.finish if is_finished else self.scheduler.cancel
        self.attempt(lambda: end(who))

    @precondition(lambda self: self.beams)
    @rule(data=st.data())
    def branch(self, data: st.DataObject) -> None:
        """Beams go on, whether or not they may."""
        search = data.draw(st.integers(0, len(self.beams) - 1))
        beams = self.beams[search]
        parent = mostly(st.integers(0, len(beams) - 1))
        parents = data.draw(st.lists(parent, min_size=1, max_size=4))
        tokens = [data.draw(mostly(st.integers(0, 2))) for _ in parents]

        def go_on() -> None:
            self.beams[search] = self.scheduler.branch(beams, parents, tokens)
            self.known.extend(self.beams[search])

        self.attempt(go_on)

    @invariant()
    def is_lawful(self) -> None:
        """After each call."""
        self.scheduler.verify()

    def teardown(self) -> None:
        """Whoever is still there can end, and gives back all blocks."""
        while self.under_way:
            self.abandon()
        for number in self.known:
            try:
                self.scheduler.cancel([number])
            except UnknownSequence:
                continue
        assert not self.scheduler.arrays.is_alive.any()
        assert self.scheduler.is_idle
        assert self.scheduler.statistics().used_blocks == 0
        self.scheduler.verify()

    def attempt(self, call: Any) -> None:
        """Do it, or have it refused in one line."""
        try:
            call()
        except PagedKVError as refusal:
            assert "\n" not in str(refusal)

    def tokens_for(self, batch: Batch) -> list[int]:
        """What those who are due say."""
        beams = {beam for search in self.beams for beam in search}
        return [CHOSEN_LATER if s in beams else 1 for s in batch.due.tolist()]


TestAnyCalls = AnyCalls.TestCase
TestAnyCalls.settings = settings(max_examples=200, stateful_step_count=30)
