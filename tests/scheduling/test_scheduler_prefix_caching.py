"""The scheduler with prefix caching: what it finds, whom it lets wait, and that all get through."""

from __future__ import annotations

from hypothesis import event, given
from hypothesis import strategies as st

from models.scheduled_run import Asked, ScheduledRun, Told
from pagedkv.scheduling.limits import Limits

_SHARED, _OWN = 1_000, 1_000_000


def keyed(
    prompt: int,
    output: int,
    *,
    block_size: int,
    family: int = 1,
    shared: int = 0,
    number: int = 0,
    samples: int = 1,
    arrives: int = 0,
) -> Asked:
    """A request whose first `shared` prompt tokens are those of its family, the rest its own."""
    of_sample = []
    for j in range(samples):
        keys = []
        for i in range((prompt + output - 1) // block_size):
            stop = (i + 1) * block_size
            if stop <= min(shared, prompt):
                keys.append(family * _SHARED + i)
            else:
                keys.append(_OWN * (1 + number) + (0 if stop <= prompt else j) * _SHARED + i)
        of_sample.append(tuple(keys))
    return Asked(prompt, output, samples, arrives, tuple(of_sample))


@st.composite
def settings_and_requests(draw: st.DrawFn) -> tuple[int, Limits, list[Asked]]:
    block_size = draw(st.sampled_from([1, 2, 4]))
    max_num_seqs = draw(st.integers(1, 5))
    limits = Limits(
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + draw(st.integers(0, 16)),
        chunked_prefill=draw(st.booleans()),
        watermark_blocks=draw(st.sampled_from([0, 0, 1, 3])),
    )
    num_requests = draw(st.integers(1, 10))
    arrivals = sorted(draw(st.lists(st.integers(0, 15), min_size=num_requests)))
    requests = [
        keyed(
            draw(st.integers(1, 16)),
            draw(st.integers(1, 8)),
            block_size=block_size,
            family=draw(st.integers(1, 2)),
            shared=draw(st.integers(0, 16)),
            number=number,
            samples=draw(st.sampled_from([n for n in (1, 1, 2, 3) if n <= max_num_seqs])),
            arrives=arrivals[number],
        )
        for number in range(num_requests)
    ]
    largest = max(-(-(r.prompt + r.output - 1) // block_size) for r in requests)
    num_blocks = largest + draw(st.sampled_from([0, 1, 2, 3, 5, 8, 13, 200]))
    return num_blocks, limits, requests


@given(settings_and_requests())
def test_all_requests_get_through_and_find_what_was_published(
    case: tuple[int, Limits, list[Asked]],
) -> None:
    num_blocks, limits, requests = case
    block_size = limits.block_size
    run = ScheduledRun(requests, num_blocks, limits)
    leads = set(run.lead_of.values())
    published: set[int] = set()
    first_admissions: list[int] = []
    tokens = run.sequences.num_tokens
    idle = 0
    while not run.is_over:
        asked = tokens.tolist()  # a sequence that may be admitted gets no token before the commit
        told = run.step()
        for s, cached in told.admitted:
            keys = _keys(run, s)[: (asked[s] - 1) // block_size]
            hits = next((i for i, key in enumerate(keys) if key not in published), len(keys))
            assert cached <= hits * block_size
            if run.num_evicted == 0:
                assert cached == hits * block_size
            elif cached < hits * block_size:
                event("a prefix was evicted")
            if cached > 0 and s in first_admissions:
                event("a preempted sequence was found again")
            if s in leads and s not in first_admissions:
                first_admissions.append(s)
        for s, start, num_new in told.computes:
            published.update(_keys(run, s)[: (start + num_new) // block_size])
        _check_step(run, told)
        idle = 0 if told.computes else idle + 1
        assert idle <= 16, "nothing runs although somebody waits"
    assert first_admissions == sorted(leads)
    assert run.num_free == num_blocks
    assert sorted(run.done) == list(range(len(run.sequences.state)))
    assert (run.sequences.num_tokens == run.sequences.total_tokens).all()


def _keys(run: ScheduledRun, s: int) -> list[int]:
    first = run.sequences.first_key[s]
    keys: list[int] = run.sequences.keys[first : first + run.sequences.num_keys[s], 0].tolist()
    return keys


def _check_step(run: ScheduledRun, told: Told) -> None:
    limits = run.limits
    num_new = sum(n for _, _, n in told.computes)
    if num_new > limits.max_num_batched_tokens:
        assert not limits.chunked_prefill and len(told.computes) == 1
    assert len({s for s, _, _ in told.computes}) == len(told.computes) <= limits.max_num_seqs
    assert len(run.running) <= limits.max_num_seqs
    assert not (told.admitted and told.preempted)
    if not limits.chunked_prefill:
        assert [s for s, _, _ in told.computes] == told.sampled


@given(settings_and_requests())
def test_leaving_a_blocked_request_alone_changes_no_decision(
    case: tuple[int, Limits, list[Asked]],
) -> None:
    num_blocks, limits, requests = case
    with_shortcut = ScheduledRun(requests, num_blocks, limits)
    without = ScheduledRun(requests, num_blocks, limits, shortcut=False)
    while not without.is_over:
        assert with_shortcut.step() == without.step()


def test_a_request_that_did_not_fit_gets_in_when_its_prefix_is_published() -> None:
    nine = {"prompt": 9, "output": 9, "block_size": 4, "shared": 8}
    run = ScheduledRun([keyed(**nine, number=i) for i in range(2)], 5, Limits(4, 4, 64, True, 0))
    assert run.step().admitted == [(0, 0)]
    assert run.step().admitted == [(1, 8)]


def test_a_prefix_that_becomes_whole_again_frees_a_blocked_request_at_once() -> None:
    """B's own first block has no key, since A's twin of it had the key first; A's is evicted. So
    H finds nothing, until D publishes the first block: then all that B has is found at once."""
    shared = {"block_size": 2, "shared": 10}
    requests = [
        keyed(3, 1, number=0, **shared),  # A
        keyed(11, 9, number=1, **shared),  # B
        Asked(prompt=12, output=1, arrives=1),  # takes every free block, A's first one included
        keyed(3, 9, number=3, arrives=2, **shared),  # D
        keyed(11, 1, number=4, arrives=2, **shared),  # H
    ]
    run = ScheduledRun(requests, 12, Limits(2, 8, 64, True, 0))
    assert [s for s, _ in run.step().admitted] == [0, 1]
    assert [s for s, _ in run.step().admitted] == [2]
    assert run.step().admitted == [(3, 0)]
    assert run.waiting == [4]
    assert run.step().admitted == [(4, 10)]


def test_two_equal_prompts_in_one_step_share_nothing_and_the_third_hits() -> None:
    nine = {"prompt": 9, "output": 3, "block_size": 4, "shared": 9}
    requests = [keyed(**nine, number=0), keyed(**nine, number=1), keyed(**nine, arrives=1)]
    run = ScheduledRun(requests, 9, Limits(4, 4, 64, True, 0))
    assert run.step().admitted == [(0, 0), (1, 0)]
    assert run.step().admitted == [(2, 8)]


def test_a_fully_cached_prompt_computes_its_last_token_again() -> None:
    twelve = {"prompt": 12, "output": 1, "block_size": 4, "shared": 12}
    run = ScheduledRun([keyed(**twelve), keyed(**twelve, arrives=1)], 4, Limits(4, 4, 64, True, 0))
    run.step()
    told = run.step()
    assert told.admitted == [(1, 8)]
    assert told.computes == [(1, 8, 4)]


def test_cached_blocks_that_hit_are_not_counted_as_room_too() -> None:
    """5 free blocks of which 2 are the hits, 6 needed, 4 new: only 3 are left for them."""
    requests = [
        keyed(9, 1, block_size=4, shared=8, number=0),
        Asked(prompt=1, output=9, arrives=1),
        keyed(23, 1, block_size=4, shared=8, number=2, arrives=2),
    ]
    run = ScheduledRun(requests, 6, Limits(4, 4, 64, True, 0))
    run.step()
    run.step()
    assert run.num_free == 5
    assert run.step().admitted == []
    assert run.waiting == [2]
    run.steps(at_most=20)
    assert run.num_evicted == 0


def test_blocks_in_use_by_others_need_no_room() -> None:
    requests = [
        keyed(33, 9, block_size=4, shared=32, number=0),
        keyed(33, 1, block_size=4, shared=32, number=1, arrives=1),
    ]
    run = ScheduledRun(requests, 11, Limits(4, 4, 64, True, 0))
    run.step()
    assert run.num_free == 2
    assert run.step().admitted == [(1, 32)]


def test_samples_share_the_prompt_and_publish_their_own_answers() -> None:
    requests = [keyed(6, 7, block_size=4, number=0, samples=2)]
    run = ScheduledRun(requests, 8, Limits(4, 4, 64, True, 0))
    run.step()
    assert run.running == [0, 1] and run.num_free == 6
    told = run.step()
    assert len(told.copies) == 1 and run.num_free == 5
    run.steps(at_most=10)
    index = run.memory.pool
    published = sorted(index.key[index.key_state == 2, 0].tolist())
    assert published == sorted({*requests[0].keys[0], *requests[0].keys[1]})
    assert len(published) == 5  # one block of the prompt, two of each answer


def test_a_preempted_request_finds_its_own_blocks_again() -> None:
    """All but the deepest, which the older request took at once."""
    requests = [
        keyed(7, 8, block_size=4, number=0),
        keyed(7, 8, block_size=4, number=1),
    ]
    run = ScheduledRun(requests, 5, Limits(4, 4, 64, True, 0))
    told = run.steps(at_most=40)
    preempted = [step.preempted for step in told if step.preempted]
    assert preempted == [[(1, 8)]]
    readmitted = told[next(i for i, t in enumerate(told) if t.preempted) :]
    assert [a for t in readmitted for a in t.admitted] == [(1, 4)]
    assert run.sequences.num_admissions.tolist() == [1, 2]


def test_who_gives_way_does_not_come_back_in_the_same_step_although_it_would_fit() -> None:
    """The younger of two equal prompts has copies of its own, and now finds those of the other."""
    requests = [
        keyed(9, 9, block_size=4, shared=8, number=0),
        keyed(9, 9, block_size=4, shared=8, number=1),
    ]
    run = ScheduledRun(requests, 6, Limits(4, 4, 64, True, 0))
    told = run.steps(at_most=40)
    gave_way = next(i for i, step in enumerate(told) if step.preempted)
    assert told[gave_way].preempted == [(1, 12)]
    assert told[gave_way].admitted == []
    assert told[gave_way].computes == [(0, 12, 1)]
    assert told[gave_way + 1].admitted == [(1, 12)]
