"""Beams that go on together: forked, ended and held, whatever else runs and however full it is."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.token_storage import TokenStorage
from pagedkv.errors import InvalidInput, NeverFits, UnknownSequence
from pagedkv.scheduling.continuous import CHOSEN_LATER, Scheduler
from pagedkv.scheduling.limits import SchedulerConfig
from pagedkv.scheduling.queues import BLOCKED


def scheduler(
    num_blocks: int = 16,
    *,
    block_size: int = 4,
    seats: int = 8,
    budget: int = 16,
    **options: object,
) -> Scheduler:
    config = SchedulerConfig(max_num_seqs=seats, max_num_batched_tokens=budget, watermark=0.0)
    options = {"max_model_len": 200, **options}
    return Scheduler(num_blocks, config, block_size=block_size, **options)


def choice(round_: int, beams: list[tuple[int, ...]], width: int) -> tuple[list[int], list[int]]:
    """Parents and tokens that a made-up model chooses: they hang on what the beams say alone."""
    parents, tokens = [], []
    for i in range(width):
        seen = sum(map(sum, beams)) + 3 * round_ + 5 * i * i
        parents.append(seen % len(beams))
        tokens.append((seen + i) % 4)
    return parents, tokens


class Searched:
    """Searches and single answers on token storage: what is read must be what belongs there."""

    def __init__(self, made: Scheduler, *, shortcut: bool = True) -> None:
        self.scheduler = made
        self.shortcut = shortcut
        self.decided: list[tuple[list[int], ...]] = []
        self.storage = TokenStorage(made.num_blocks, made.block_size)
        self.tokens: dict[int, tuple[int, ...]] = {}  # by sequence
        self.left: dict[int, int] = {}  # of single answers
        self.searches: list[Search] = []
        self.said: dict[int, tuple[int, ...]] = {}

    def answer(self, prompt: list[int], count: int) -> int:
        [s] = self.scheduler.add(prompt, max_new_tokens=count)
        self.tokens[s], self.left[s] = tuple(prompt), count
        return s

    def search(self, prompt: list[int], width: int, rounds: int) -> Search:
        s = self.scheduler.add_search(prompt, max_new_tokens=rounds, num_beams=width)
        self.tokens[s] = tuple(prompt)
        self.searches.append(Search([s], width, rounds))
        return self.searches[-1]

    def step(self) -> None:
        made = self.scheduler
        if not self.shortcut:
            made._queues.counters[BLOCKED] = -1
        batch = made.schedule()
        assert made.num_running <= made.config.max_num_seqs
        told = (batch.sequences, batch.admitted, batch.num_cached, batch.preempted)
        self.decided.append(tuple(numbers.tolist() for numbers in told))
        self.storage.copy_pages(batch.copies)
        for i, s in enumerate(batch.sequences.tolist()):
            start, stop = batch.query_starts[i], batch.query_starts[i + 1]
            first, length = int(batch.positions[start]), int(batch.lengths[i])
            assert tuple(batch.token_ids[start:stop].tolist()) == self.tokens[s][first:length]
            content = self.storage.content("", self.tokens[s], first, length)
            self.storage.write(batch.slots[start:stop], content)
        for i, s in enumerate(batch.sequences.tolist()):
            places = np.arange(batch.lengths[i])
            table = batch.block_tables[i].astype(np.int64)
            slots = table[places // made.block_size] * made.block_size + places % made.block_size
            expected = self.storage.content("", self.tokens[s], 0, len(places))
            assert self.storage.read(slots).tolist() == expected.tolist()
        due = batch.due.tolist()
        tokens = [CHOSEN_LATER if s not in self.left else sum(self.tokens[s]) % 4 for s in due]
        made.commit(tokens)
        made.verify()
        for s, token in zip(due, tokens, strict=True):
            if s in self.left:
                self.tokens[s] += (token,)
                self.left[s] -= 1
                if self.left[s] == 0:
                    made.finish([s])
                    self.said[s] = self.tokens[s]
        for search in list(self.searches):
            search.known.update(s for s in due if s in search.beams)
            if search.known == set(search.beams):
                self._go_on(search)
        made.verify()

    def _go_on(self, search: Search) -> None:
        search.known.clear()
        before = [self.tokens[s] for s in search.beams]
        parents, tokens = choice(search.round, before, search.width)
        search.round += 1
        after = [(*before[p], t) for p, t in zip(parents, tokens)]
        if search.round == search.rounds:
            self.scheduler.finish(search.beams)
            self.searches.remove(search)
            search.said = after
            return
        old, search.beams = search.beams, self.scheduler.branch(search.beams, parents, tokens)
        assert len(set(search.beams)) == search.width
        assert {s for s in search.beams if s in old} == {old[p] for p in parents}
        self.tokens.update(zip(search.beams, after))
        for s, said in zip(search.beams, after):
            assert tuple(self.scheduler.token_ids(s).tolist()) == said

    def cancel(self, search: Search) -> None:
        if search in self.searches:
            self.searches.remove(search)
            self.scheduler.cancel(search.beams[-1:])  # with one beam goes the search
            self.scheduler.verify()

    def finish_all(self) -> None:
        for _ in range(3_000):
            if self.scheduler.is_idle:
                return
            self.step()
        raise AssertionError("somebody waits for ever")


class Search:
    def __init__(self, beams: list[int], width: int, rounds: int) -> None:
        self.beams = beams
        self.width = width
        self.rounds = rounds
        self.round = 0
        self.known: set[int] = set()
        self.said: list[tuple[int, ...]] = []


def found(prompt: list[int], width: int, rounds: int) -> list[tuple[int, ...]]:
    """What a search finds by itself, without any memory."""
    beams = [tuple(prompt)]
    for round_ in range(rounds):
        parents, tokens = choice(round_, beams, width)
        beams = [(*beams[p], t) for p, t in zip(parents, tokens)]
    return beams


prompts = st.lists(st.integers(0, 3), min_size=1, max_size=20)


@given(
    events=st.lists(
        st.tuples(st.integers(0, 3), prompts, st.integers(0, 4), st.integers(1, 9), st.booleans()),
        max_size=10,
    ),
    block_size=st.sampled_from([1, 3, 4, 16]),
    num_slots=st.integers(32, 90),
    budget=st.integers(4, 30),
    caching=st.booleans(),
)
def test_every_beam_reads_what_belongs_to_it_whatever_comes_and_goes(
    events: list[tuple[int, list[int], int, int, bool]],
    block_size: int,
    num_slots: int,
    budget: int,
    caching: bool,
) -> None:
    run = Searched(
        scheduler(
            num_slots // block_size,
            block_size=block_size,
            seats=4,
            budget=budget,
            prefix_caching=caching,
        )
    )
    expected: list[tuple[Search, list[tuple[int, ...]]]] = []
    for pause, prompt, width, rounds, leaves in events:
        for _ in range(pause):
            run.step()
        if width == 0:  # a single answer
            run.answer(prompt, rounds)
        else:
            search = run.search(prompt, width, rounds)
            expected.append((search, found(prompt, width, rounds)))
        if leaves and expected:
            run.cancel(expected.pop(0)[0])
    run.finish_all()
    assert [search.said for search, _ in expected] == [said for _, said in expected]
    assert all(len(said) for said in run.said.values()) and not run.searches
    assert run.scheduler.statistics().used_blocks == 0
    assert not run.scheduler._beams


def crowd(made: Scheduler, width: int, *, alike: bool, shortcut: bool = True) -> Searched:
    """Two searches, each of which needs every seat, and short answers that come all the time,
    `alike`: to prompts that begin as one of the beams does."""
    run = Searched(made, shortcut=shortcut)
    for _ in range(2):
        search = run.search([1, 2, 3, 0, 1, 2, 3], width, 9)
        for i in range(5):
            like = list(run.tokens[search.beams[i % len(search.beams)]])
            run.answer([*like[:12], 3] if alike else [2] * (1 + i % 3), 2 + i % 2)
            run.step()
            run.step()
        assert search.said == [] or len(search.said) == width
    run.finish_all()
    return run


@pytest.mark.parametrize("num_blocks", range(4, 15))
@pytest.mark.parametrize(("width", "seats"), [(2, 2), (3, 3), (3, 5)])
@pytest.mark.parametrize("alike", [False, True])
def test_in_every_small_memory_seats_are_enough_and_the_shortcut_changes_no_decision(
    num_blocks: int, width: int, seats: int, alike: bool
) -> None:
    one, other = (
        crowd(scheduler(num_blocks, seats=seats, budget=8), width, alike=alike, shortcut=shortcut)
        for shortcut in (True, False)
    )
    assert one.decided == other.decided
    assert len(one.said) == 10
    if num_blocks < 7:
        assert one.scheduler.statistics().preemptions > 0


def test_a_prompt_is_computed_beside_beams_that_wait_for_another() -> None:
    made = scheduler(9, seats=4, budget=4)
    run = Searched(made)
    search = run.search([1, 2, 3, 0, 1, 2], 2, 12)
    run.step()
    run.answer([3] * 20, 1)
    beside = 0
    while not made.is_idle:
        run.step()
        computed, _, _, preempted = run.decided[-1]
        held = [s for s in search.beams if s in search.known]
        beside += bool(held) and not preempted and not set(computed) & set(search.beams)
    assert search.said == found([1, 2, 3, 0, 1, 2], 2, 12)
    assert beside > 0


def test_what_a_fork_has_in_common_with_its_parent_and_what_it_says_is_found_again() -> None:
    made = scheduler(block_size=2)
    first = made.add_search([1, 2, 3], max_new_tokens=7, num_beams=2)
    made.schedule()
    made.commit([CHOSEN_LATER])
    beams = made.branch([first], [0, 0], [0, 1])
    for parents in ([0, 1], [0, 1], [1, 1], [0, 1], [0, 1]):
        made.schedule()
        made.commit([CHOSEN_LATER] * 2)
        beams = made.branch(beams, parents, [2, 3])
    fork = made.token_ids(beams[1]).tolist()
    assert fork == [1, 2, 3, 1, 3, 3, 3, 3, 3]
    made.finish(beams)
    made.add([*fork, 0], max_new_tokens=1)
    assert made.schedule().num_cached.tolist() == [8]


def test_forks_of_a_beam_that_gave_way_are_computed_in_their_order() -> None:
    made = scheduler(3, seats=4)
    first = made.add_search([1, 2, 3, 4, 5, 6, 7, 8], max_new_tokens=4, num_beams=3)
    made.schedule()
    made.commit([CHOSEN_LATER])
    beams = made.branch([first], [0, 0, 0], [1, 2, 3])
    known: set[int] = set()
    order = []
    while known != set(beams):
        batch = made.schedule()
        order += batch.due.tolist()
        known |= set(batch.due.tolist())
        made.commit([CHOSEN_LATER] * len(batch.due))
    # Their full blocks are shared; the one block that is left goes from one to the other.
    assert order == beams and made.num_running == 1
    beams = made.branch(beams, [0, 0, 0], [1, 2, 3])
    assert made.num_running == 0
    before = made.statistics()
    order, cached = [], []
    while len(order) < 3:
        batch = made.schedule()
        order += batch.due.tolist()
        cached += batch.num_cached.tolist()
        made.commit([CHOSEN_LATER] * len(batch.due))
    assert order == beams and cached == [8, 8, 8]
    after = made.statistics()
    assert after.hit_tokens == 0 and after.query_tokens == 8  # forks are no prompts that could hit
    # The parent had computed one token more than it finds. Forks had computed nothing.
    assert after.recomputed_tokens - before.recomputed_tokens == 1


def test_children_share_all_blocks_of_their_parent_and_who_is_not_named_gives_its_own_back() -> (
    None
):
    made = scheduler(seats=3)
    first = made.add_search([1, 2, 3, 4, 5, 6], max_new_tokens=9, num_beams=3)
    batch = made.schedule()
    assert batch.due.tolist() == [first]
    made.commit([CHOSEN_LATER])
    three = made.branch([first], [0, 0, 0], [7, 8, 9])
    assert three[0] == first and len(set(three)) == 3
    assert made.num_running == 3  # the seats that were kept for them
    assert made.statistics().used_blocks == 2 and made.statistics().shared_blocks == 2
    batch = made.schedule()
    assert sorted(batch.token_ids.tolist()) == [7, 8, 9]
    assert len(batch.copies) == 2  # the last of the three writes into the shared block itself
    made.commit([CHOSEN_LATER] * 3)
    assert made.statistics().used_blocks == 4
    two = made.branch(three, [1, 1], [10, 11])
    assert two[0] == three[1] and two[1] not in three
    assert made.statistics().used_blocks == 2
    assert made.token_ids(two[1]).tolist() == [1, 2, 3, 4, 5, 6, 8, 11]
    for gone in (three[0], three[2]):
        with pytest.raises(UnknownSequence):
            made.token_ids(gone)
    made.finish(two[:1])
    assert made.is_idle and made.statistics().used_blocks == 0
    made.add([9], max_new_tokens=1)
    made.schedule()
    assert made.statistics().peak_shared_blocks == 1  # while it computed


def test_beams_wait_for_each_other_and_the_others_run_meanwhile() -> None:
    made = scheduler(6, seats=4, budget=32)
    first = made.add_search([1, 2, 3, 4, 5, 6, 7], max_new_tokens=9, num_beams=3)
    made.schedule()
    made.commit([CHOSEN_LATER])
    beams = made.branch([first], [0, 0, 0], [1, 2, 3])
    [other] = made.add([9, 9, 9], max_new_tokens=8)
    computed: set[int] = set()
    while computed != set(beams):
        batch = made.schedule()
        due = batch.due.tolist()
        made.commit([CHOSEN_LATER if s in beams else 5 for s in due])
        computed |= set(due) & set(beams)
    with pytest.raises(InvalidInput, match="not all beams of one search"):
        made.branch(beams[:2], [0, 0], [1, 2])
    beams = made.branch(beams, [2, 0, 0], [1, 2, 3])
    made.verify()
    made.cancel([other])
    made.cancel(beams[1:2])
    assert made.is_idle and made.statistics().used_blocks == 0


def test_branching_is_refused_before_all_beams_are_computed_and_changes_nothing() -> None:
    made = scheduler()
    first = made.add_search([1, 2, 3, 4, 5, 6], max_new_tokens=3, num_beams=2)
    with pytest.raises(InvalidInput, match="not all beams of this search are computed"):
        made.branch([first], [0], [1])
    made.schedule()
    with pytest.raises(InvalidInput, match="a step is under way"):
        made.branch([first], [0], [1])
    with pytest.raises(InvalidInput, match="no token of its own yet: give -1"):
        made.commit([7])
    made.commit([CHOSEN_LATER])
    [single] = made.add([1, 2], max_new_tokens=2)
    for beams, parents, tokens, message in (
        ([first], [0, 0, 0], [1, 2, 3], "3 parents and 3 tokens: give as many of each, 1 to 2"),
        ([first], [0, 0], [1], "2 parents and 1 tokens"),
        ([first], [], [], "0 parents"),
        ([first], [1], [1], "a parent is not 0 to 0"),
        ([first], [0], [-1], "a token id is not"),
        ([single], [0], [1], "not all beams of one search"),
        ([first, single], [0], [1], "not all beams of one search"),
        ([], [0], [1], "not all beams of one search"),
    ):
        with pytest.raises(InvalidInput, match=message):
            made.branch(beams, parents, tokens)
    made.cancel([single])
    beams = [first]
    for _ in range(3):
        beams = made.branch(beams, [0, 0], [1, 2])
        made.schedule()
        made.commit([CHOSEN_LATER] * 2)
    with pytest.raises(InvalidInput, match="have all of their tokens"):
        made.branch(beams, [0, 1], [1, 1])


def test_a_cancelled_search_leaves_within_a_step_when_that_is_committed() -> None:
    made = scheduler()
    first = made.add_search([1, 2, 3, 4, 5, 6], max_new_tokens=9, num_beams=2)
    made.schedule()
    made.commit([CHOSEN_LATER])
    beams = made.branch([first], [0, 0], [1, 2])
    made.schedule()
    made.cancel(beams[:1])
    assert made.statistics().used_blocks > 0
    made.commit([CHOSEN_LATER] * 2)
    made.verify()
    assert made.is_idle and made.statistics().used_blocks == 0
    for gone in beams:
        with pytest.raises(UnknownSequence):
            made.branch([gone], [0], [1])


def test_an_abandoned_step_ends_whole_searches_those_that_were_held_too() -> None:
    made = scheduler(5, seats=4, budget=32)
    first = made.add_search([1, 2, 3, 4, 5, 6, 7, 8, 9], max_new_tokens=9, num_beams=4)
    made.schedule()
    made.commit([CHOSEN_LATER])
    beams = made.branch([first], [0, 0, 0, 0], [1, 2, 3, 4])
    batch = made.schedule()
    assert 0 < len(batch.sequences) < 4  # there are blocks for some of them only
    ended = made.abandon()
    assert set(beams) <= set(ended)
    made.verify()
    assert made.is_idle and made.statistics().used_blocks == 0


def test_a_search_needs_a_seat_for_each_beam_and_memory_for_one() -> None:
    made = scheduler(4, seats=4)
    with pytest.raises(InvalidInput, match="asks for 5 beams, which run at once"):
        made.add_search([1], max_new_tokens=2, num_beams=5)
    with pytest.raises(NeverFits):
        made.add_search([1] * 10, max_new_tokens=8, num_beams=1)
    with pytest.raises(InvalidInput, match="0 beams"):
        made.add_search([1], max_new_tokens=2, num_beams=0)
    assert made.is_idle
