"""The scheduler: who computes how many tokens in the next step.

First come, first served. In each step:

1. every running sequence that needs one token gets it; when blocks run out, the youngest running
   sequence gives way: its blocks are released, and it waits at the front to be recomputed;
2. a running sequence in the middle of its prompt gets what is left of the token budget, if there
   are blocks; there is one at most, since nobody is admitted before its prompt is done;
3. waiting sequences are admitted in order, as long as there are seats, budget and blocks. One is
   admitted only if its whole prompt fits beside what running prompts still need, though it takes
   only the blocks that this step writes to: two prompts that fit only one after the other run one
   after the other instead of chasing each other out.

Nobody is admitted in a step in which somebody had to give way. It could fit at once, where it had
blocks of its own of what it now finds in another's, and would take those that the next decodes
need. When nothing runs the watermark does not count, so a sequence that fits at all is always
admitted at last.

The beams of a search go on together: one whose tokens are all computed is held, with its blocks,
until the others are as far, and `branch` says how they go on. A held beam may have to give way like
any other; then it waits in no queue before there is something to compute. Where nobody can compute,
because held beams have the blocks that others need, the youngest of them gives way. So a search
gets through wherever one of its beams fits.

A sequence at the head of the queue that did not fit is not looked up again in every step. It needs
at least its blocks less those of them that others use, found or behind a gap in the chain. Those
grow in number only by blocks that get published, at most one block each; until these and the
blocks that came free could make up for what was missing, it is left alone. (Not by cached blocks
that somebody finds again: only who gave way can overtake the head, and somebody gives way only
when no block is free, so by then all that was cached when the head was looked at is gone.)

A step may be decided while the one before it runs. `anticipate` counts the token that each
sequence is about to have, whatever it will be, and forks; then `schedule` decides as ever, and
`commit` of the running step publishes what it filled once that is known to be there. The last
token of a sequence is not anticipated: nothing is computed after it. Nobody gives way in such a
step (`has_room_ahead`): what a running step has filled could not be found again by whoever lost it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pagedkv.compiling import compiled_in_place
from pagedkv.memory import allocation, block_table, prefix_cache
from pagedkv.memory.allocation import Memory
from pagedkv.memory.block_table import blocks_for
from pagedkv.memory.blocks import FREE, PUBLICATIONS
from pagedkv.scheduling import queues as queue
from pagedkv.scheduling.limits import Limits
from pagedkv.scheduling.queues import (
    BLOCKED,
    BLOCKED_MARK,
    BLOCKED_NEED,
    EXPECTED,
    FINISHED,
    NO_ROW,
    RUNNING,
    RUNNING_SIZE,
    WAITING,
    WAITING_HEAD,
    WAITING_SIZE,
    Queues,
    Sequences,
)

SCHEDULED, COPIES, ADMITTED, PREEMPTED, FORKED = 0, 1, 2, 3, 4
"""Places in `Plan.counters`: how many entries of each array below belong to this step."""


class Plan(NamedTuple):
    """One step: what `schedule` decided, and after `commit` what came of it."""

    sequence: NDArray[np.int64]  # [SCHEDULED] who computes
    start: NDArray[np.int64]  # [SCHEDULED] tokens computed before this step
    num_new: NDArray[np.int64]  # [SCHEDULED] tokens to compute in it
    samples: NDArray[np.bool_]  # [SCHEDULED] whether it has a new token after this step
    is_anticipated: NDArray[np.bool_]  # [SCHEDULED] whether that token is counted already
    copies: NDArray[np.int32]  # [COPIES, 2] blocks to copy first, in this order: from, to
    admitted: NDArray[np.int64]  # [ADMITTED] sequences
    num_cached: NDArray[np.int64]  # [ADMITTED] tokens that each found in the cache
    preempted: NDArray[np.int64]  # [PREEMPTED] sequences
    num_lost: NDArray[np.int64]  # [PREEMPTED] computed tokens that each gave up
    forked: NDArray[np.int64]  # [FORKED] sequences that began by forking, after `commit`
    counters: NDArray[np.int64]
    found: NDArray[np.int32]  # scratch for look-ups


def make_plan(max_num_seqs: int, width: int) -> Plan:
    """Room for steps of up to `max_num_seqs` sequences of up to `width` blocks."""
    return Plan(
        sequence=np.zeros(max_num_seqs, dtype=np.int64),
        start=np.zeros(max_num_seqs, dtype=np.int64),
        num_new=np.zeros(max_num_seqs, dtype=np.int64),
        samples=np.zeros(max_num_seqs, dtype=np.bool_),
        is_anticipated=np.zeros(max_num_seqs, dtype=np.bool_),
        copies=np.zeros((max_num_seqs, 2), dtype=np.int32),
        admitted=np.zeros(max_num_seqs, dtype=np.int64),
        num_cached=np.zeros(max_num_seqs, dtype=np.int64),
        preempted=np.zeros(max_num_seqs, dtype=np.int64),
        num_lost=np.zeros(max_num_seqs, dtype=np.int64),
        forked=np.zeros(max_num_seqs, dtype=np.int64),
        counters=np.zeros(5, dtype=np.int64),
        found=np.zeros(width, dtype=np.int32),
    )


@compiled_in_place
def schedule(
    memory: Memory, sequences: Sequences, queues: Queues, plan: Plan, limits: Limits
) -> None:
    """Decide the next step and make room for its tokens; the decision is in `plan`."""
    plan.counters[:] = 0
    budget = limits.max_num_batched_tokens
    i = 0
    while i < queues.counters[RUNNING_SIZE]:
        s = queues.running[i]
        if _num_uncomputed(memory, sequences, s) == 1:
            if not _make_room(memory, sequences, queues, plan, s, limits):
                break  # it was the youngest itself and gave way
            _compute(memory, sequences, plan, s, 1, limits)
            budget -= 1
        i += 1

    for i in range(queues.counters[RUNNING_SIZE]):
        s = queues.running[i]
        num_uncomputed = _num_uncomputed(memory, sequences, s)
        if num_uncomputed <= 1:
            continue
        num_new = min(num_uncomputed, budget)
        needed = allocation.blocks_to_grow(memory, sequences.row[s], num_new, limits.block_size)
        if num_new == 0 or needed > memory.pool.counters[FREE]:
            break  # it waits for decodes to finish; alone, it has all of the memory
        _compute(memory, sequences, plan, s, num_new, limits)
        budget -= num_new

    if plan.counters[PREEMPTED] == 0:
        _admit(memory, sequences, queues, plan, budget, limits)
        if plan.counters[SCHEDULED] == 0:
            _release_youngest_held(memory, sequences, queues, plan, limits.block_size)


@compiled_in_place
def commit(
    memory: Memory, sequences: Sequences, queues: Queues, plan: Plan, limits: Limits
) -> None:
    """The step has run: publish the blocks it filled, count the tokens it sampled, fork.

    `plan.samples` says who has a new token, and `plan.forked` which followers began. Nobody in
    the plan has ended since it was made.
    """
    for i in range(plan.counters[FORKED]):  # those that were anticipated
        s = plan.forked[i]
        num_computed = sequences.prompt_tokens[s]
        allocation.commit(memory, sequences.row[s], num_computed, limits.block_size)
    for i in range(plan.counters[SCHEDULED]):
        s = plan.sequence[i]
        num_computed = plan.start[i] + plan.num_new[i]
        allocation.commit(memory, sequences.row[s], num_computed, limits.block_size)
        if plan.is_anticipated[i]:
            plan.samples[i] = True
            continue
        plan.samples[i] = num_computed == sequences.num_tokens[s] and not sequences.is_beam[s]
        if plan.samples[i]:
            _count_token(memory, sequences, queues, plan, s)


@compiled_in_place
def anticipate(memory: Memory, sequences: Sequences, queues: Queues, plan: Plan) -> None:
    """The step runs: count the tokens that it brings, and fork, before they are known.

    Not the last token of a sequence, after which there is nothing to compute, and not those of
    beams, which choose theirs together.
    """
    for i in range(plan.counters[SCHEDULED]):
        s = plan.sequence[i]
        num_tokens = sequences.num_tokens[s]
        if (
            plan.start[i] + plan.num_new[i] == num_tokens
            and num_tokens + 1 < sequences.total_tokens[s]
            and not sequences.is_beam[s]
        ):
            plan.is_anticipated[i] = True
            _count_token(memory, sequences, queues, plan, s)


@compiled_in_place
def _count_token(memory: Memory, sequences: Sequences, queues: Queues, plan: Plan, s: int) -> None:
    """Sequence `s` has one more token; if it is the first of its answer, its followers fork."""
    if sequences.num_tokens[s] == sequences.prompt_tokens[s]:
        _fork_followers(memory, sequences, queues, plan, s)
    sequences.num_tokens[s] += 1


@compiled_in_place
def has_room_ahead(memory: Memory, sequences: Sequences, queues: Queues, block_size: int) -> bool:
    """Whether each that needs one token can have it without anybody giving way."""
    needed = 0
    for i in range(queues.counters[RUNNING_SIZE]):
        s = queues.running[i]
        if _num_uncomputed(memory, sequences, s) == 1:
            needed += allocation.blocks_to_grow(memory, sequences.row[s], 1, block_size)
    return bool(needed <= memory.pool.counters[FREE])


@compiled_in_place
def branch(
    memory: Memory,
    sequences: Sequences,
    queues: Queues,
    limits: Limits,
    beams: NDArray[np.int64],
    parents: NDArray[np.int64],
    first: int,
    is_free: NDArray[np.bool_],
    next_beams: NDArray[np.int64],
) -> None:
    """The beams of a search, all of them held, go on: `next_beams[i]` from `beams[parents[i]]`.

    The search has the sequences from `first` on, as many as `is_free` has places; that one and
    `next_beams` int64 [len(parents)] are written to.

    A parent that is not named gives back its blocks; one goes on as itself where it is named
    first, and is forked where it is named again, into a place that is nobody's. A fork shares all
    blocks. Where its parent has none, or no seat is left, it waits to be computed, before all
    others. The caller appends the new tokens.
    """
    is_free[:] = True
    for i in range(len(parents)):
        is_free[beams[parents[i]] - first] = False
    for i in range(len(beams)):
        s = beams[i]
        if is_free[s - first]:
            if sequences.state[s] == RUNNING:
                allocation.release(memory, sequences.row[s], limits.block_size)
                sequences.row[s] = NO_ROW
            sequences.state[s] = EXPECTED
    queue.drop_finished(sequences, queues)

    num_seats = limits.max_num_seqs - queues.counters[RUNNING_SIZE]
    num_seats -= _promised(memory, sequences, queues, limits.block_size)[1]
    if sequences.state[first] == RUNNING:  # what is promised to its own followers, they get now
        num_seats += _followers_to_come(sequences, first)
    place = 0
    for i in range(len(parents)):
        parent = beams[parents[i]]
        is_named_before = False
        for j in range(i):
            is_named_before |= parents[j] == parents[i]
        if not is_named_before:
            next_beams[i] = parent
            continue
        while not is_free[place]:
            place += 1
        is_free[place] = False
        s = first + place
        next_beams[i] = s
        _take_after(sequences, parent, s)
        if sequences.state[parent] == RUNNING and num_seats > 0:
            sequences.row[s] = allocation.fork(memory, sequences.row[parent])
            queue.start(sequences, queues, s)
            num_seats -= 1
    for i in range(len(next_beams) - 1, -1, -1):
        if sequences.state[next_beams[i]] == EXPECTED:
            queue.push_front(sequences, queues, next_beams[i])
    # The head of the queue is another one, or finds what was nobody's when it was looked at.
    queues.counters[BLOCKED] = -1


@compiled_in_place
def _take_after(sequences: Sequences, parent: int, s: int) -> None:
    """Sequence `s` has the tokens and the keys of `parent`; a column of the same size."""
    sequences.num_tokens[s] = sequences.num_tokens[parent]
    sequences.num_admissions[s] = sequences.num_admissions[parent]
    sequences.num_keys[s] = sequences.num_keys[parent]
    old, new = sequences.first_key[parent], sequences.first_key[s]
    for i in range(sequences.num_keys[parent]):
        sequences.keys[new + i, 0] = sequences.keys[old + i, 0]
        sequences.keys[new + i, 1] = sequences.keys[old + i, 1]


@compiled_in_place
def finish(memory: Memory, sequences: Sequences, s: int, block_size: int) -> None:
    """Running sequence `s` ends and gives back its blocks; `queues.drop_finished` follows."""
    allocation.release(memory, sequences.row[s], block_size)
    sequences.row[s] = NO_ROW
    sequences.state[s] = FINISHED


@compiled_in_place
def end(
    memory: Memory,
    sequences: Sequences,
    queues: Queues,
    ending: NDArray[np.int64],
    block_size: int,
) -> None:
    """The sequences `ending` end, int64 [n], from whichever state each is in.

    Those that run give back their blocks whatever their order in `ending`, see `drop_finished`.
    """
    any_runs = False
    for i in range(len(ending)):
        s = ending[i]
        if sequences.state[s] == RUNNING:
            any_runs = True
        elif sequences.state[s] == WAITING:
            queue.leave_waiting(queues, s)
        sequences.state[s] = FINISHED
        if queues.counters[BLOCKED] == s:  # its number may become another's
            queues.counters[BLOCKED] = -1
    if any_runs:
        drop_finished(memory, sequences, queues, block_size)


@compiled_in_place
def drop_finished(memory: Memory, sequences: Sequences, queues: Queues, block_size: int) -> None:
    """The running sequences whose state says that they have finished give back their blocks.

    In the order in which they began to run: which block is handed out next hangs on it, and so a
    run can be repeated by somebody who knows no more than who ended.
    """
    for i in range(queues.counters[RUNNING_SIZE]):
        s = queues.running[i]
        if sequences.state[s] == FINISHED:
            finish(memory, sequences, s, block_size)
    queue.drop_finished(sequences, queues)


@compiled_in_place
def _num_uncomputed(memory: Memory, sequences: Sequences, s: int) -> int:
    """Tokens that running sequence `s` has to compute and that no step computes yet.

    None if it is a beam that is held, or if the running step brings its last token.
    """
    return int(sequences.num_tokens[s] - memory.tables.num_tokens[sequences.row[s]])


@compiled_in_place
def _compute(
    memory: Memory, sequences: Sequences, plan: Plan, s: int, num_new: int, limits: Limits
) -> None:
    """Sequence `s` computes `num_new` tokens in this step; there are blocks for them."""
    row = sequences.row[s]
    start = memory.tables.num_tokens[row]
    plan.counters[COPIES] = allocation.grow(
        memory, row, num_new, limits.block_size, plan.copies, plan.counters[COPIES]
    )
    if sequences.num_keys[s] > 0:
        first = sequences.first_key[s]
        keys = sequences.keys[first : first + sequences.num_keys[s]]
        allocation.await_keys(memory, row, start, start + num_new, keys, limits.block_size)
    plan.sequence[plan.counters[SCHEDULED]] = s
    plan.start[plan.counters[SCHEDULED]] = start
    plan.num_new[plan.counters[SCHEDULED]] = num_new
    plan.is_anticipated[plan.counters[SCHEDULED]] = False
    plan.counters[SCHEDULED] += 1


@compiled_in_place
def _make_room(
    memory: Memory, sequences: Sequences, queues: Queues, plan: Plan, s: int, limits: Limits
) -> bool:
    """Let the youngest give way until `s` can have one token; False if it came to `s` itself."""
    while (
        allocation.blocks_to_grow(memory, sequences.row[s], 1, limits.block_size)
        > memory.pool.counters[FREE]
    ):
        if _preempt_youngest(memory, sequences, queues, plan, limits.block_size) == s:
            return False
    return True


@compiled_in_place
def _preempt_youngest(
    memory: Memory, sequences: Sequences, queues: Queues, plan: Plan, block_size: int
) -> int:
    """The running sequence that began last gives way; returns which it is."""
    s = int(queues.running[queues.counters[RUNNING_SIZE] - 1])
    _preempt(memory, sequences, queues, plan, s, block_size)
    return s


@compiled_in_place
def _release_youngest_held(
    memory: Memory, sequences: Sequences, queues: Queues, plan: Plan, block_size: int
) -> None:
    """The youngest beam that is held, if there is one, gives way to whoever could compute."""
    for i in range(queues.counters[RUNNING_SIZE] - 1, -1, -1):
        s = int(queues.running[i])
        if sequences.is_beam[s] and _num_uncomputed(memory, sequences, s) == 0:
            _preempt(memory, sequences, queues, plan, s, block_size)
            # Once back, it may be before who was found not to fit, with blocks that were nobody's.
            queues.counters[BLOCKED] = -1
            return


@compiled_in_place
def _preempt(
    memory: Memory, sequences: Sequences, queues: Queues, plan: Plan, s: int, block_size: int
) -> None:
    """Running sequence `s` gives way: its blocks go, it waits to be recomputed."""
    is_held = _num_uncomputed(memory, sequences, s) == 0
    plan.preempted[plan.counters[PREEMPTED]] = s
    plan.num_lost[plan.counters[PREEMPTED]] = memory.tables.num_computed[sequences.row[s]]
    plan.counters[PREEMPTED] += 1
    allocation.release(memory, sequences.row[s], block_size)
    sequences.row[s] = NO_ROW
    sequences.state[s] = EXPECTED
    queue.leave_running(queues, s)
    if not is_held:
        queue.push_front(sequences, queues, s)


@compiled_in_place
def _promised(
    memory: Memory, sequences: Sequences, queues: Queues, block_size: int
) -> tuple[int, int]:
    """Blocks and seats that running sequences will take before they are done with their prompt.

    A follower takes a seat when it forks, and a block when it first writes.
    """
    num_blocks, num_seats = 0, 0
    for i in range(queues.counters[RUNNING_SIZE]):
        s = queues.running[i]
        num_held = memory.tables.num_tokens[sequences.row[s]]
        num_followers = _followers_to_come(sequences, s)
        num_blocks += blocks_for(sequences.num_tokens[s], block_size)
        num_blocks += num_followers - blocks_for(num_held, block_size)
        num_seats += num_followers
    return num_blocks, num_seats


@compiled_in_place
def _followers_to_come(sequences: Sequences, s: int) -> int:
    """Sequences that will fork from `s` when its prompt is computed: none once it is."""
    if sequences.num_tokens[s] > sequences.prompt_tokens[s]:
        return 0
    return int(sequences.num_followers[s])


@compiled_in_place
def _admit(
    memory: Memory,
    sequences: Sequences,
    queues: Queues,
    plan: Plan,
    budget: int,
    limits: Limits,
) -> None:
    if queues.counters[WAITING_SIZE] == 0 or budget == 0:
        return
    block_size = limits.block_size
    promised, promised_seats = _promised(memory, sequences, queues, block_size)
    while queues.counters[WAITING_SIZE] > 0 and budget > 0:
        s = queues.waiting[queues.counters[WAITING_HEAD]]
        num_followers = _followers_to_come(sequences, s)
        if queues.counters[RUNNING_SIZE] + promised_seats + 1 + num_followers > limits.max_num_seqs:
            return
        room = memory.pool.counters[FREE] - promised
        if queues.counters[RUNNING_SIZE] > 0:
            room -= limits.watermark_blocks
            if _is_still_blocked(memory, queues, s, room):
                return
        first = sequences.first_key[s]
        keys = sequences.keys[first : first + sequences.num_keys[s]]
        num_tokens = sequences.num_tokens[s]
        num_hits, num_hits_free = allocation.find_prefix(
            memory.pool, keys, num_tokens, block_size, plan.found
        )
        needed = blocks_for(num_tokens, block_size) - num_hits + num_hits_free
        if needed > room:
            queues.counters[BLOCKED] = s
            queues.counters[BLOCKED_NEED] = _least_needed(memory, keys, num_tokens, block_size)
            queues.counters[BLOCKED_MARK] = memory.pool.counters[PUBLICATIONS]
            return
        num_cached = num_hits * block_size
        num_new = min(num_tokens - num_cached, budget)
        if num_cached + num_new < num_tokens and not limits.chunked_prefill:
            if plan.counters[SCHEDULED] > 0:
                return
            num_new = num_tokens - num_cached
        queue.start_first(sequences, queues)
        row = block_table.take_row(memory.tables)
        sequences.row[s] = row
        allocation.share_prefix(memory, row, plan.found, num_hits, block_size)
        plan.admitted[plan.counters[ADMITTED]] = s
        plan.num_cached[plan.counters[ADMITTED]] = num_cached
        plan.counters[ADMITTED] += 1
        _compute(memory, sequences, plan, s, num_new, limits)
        promised += blocks_for(num_tokens, block_size) - blocks_for(
            num_cached + num_new, block_size
        )
        promised += num_followers
        promised_seats += num_followers
        budget = max(budget - num_new, 0)


@compiled_in_place
def _least_needed(
    memory: Memory, keys: NDArray[np.uint64], num_tokens: int, block_size: int
) -> int:
    """Blocks that a sequence needs even if all of its blocks that others use could hit.

    One that is in use behind a lost one cannot hit, and all behind it can as soon as that one
    block is published again: what is needed now, less the changes since, would be no bound.
    """
    in_use = 0
    for i in range(min(len(keys), (num_tokens - 1) // block_size)):
        block = prefix_cache.find(memory.pool, keys[i, 0], keys[i, 1])
        if block >= 0 and memory.pool.ref_count[block] > 0:
            in_use += 1
    return blocks_for(num_tokens, block_size) - in_use


@compiled_in_place
def _is_still_blocked(memory: Memory, queues: Queues, s: int, room: int) -> bool:
    """Whether `s`, found not to fit before, cannot fit yet whatever a look-up would find."""
    if queues.counters[BLOCKED] != s:
        return False
    could_shrink = memory.pool.counters[PUBLICATIONS] - queues.counters[BLOCKED_MARK]
    return bool(queues.counters[BLOCKED_NEED] - could_shrink > room)


@compiled_in_place
def _fork_followers(
    memory: Memory, sequences: Sequences, queues: Queues, plan: Plan, s: int
) -> None:
    """The followers of `s`, whose prompt is computed, begin with all of its blocks.

    There are seats for them: admission has kept them.
    """
    for follower in range(s + 1, s + 1 + sequences.num_followers[s]):
        sequences.num_tokens[follower] = sequences.prompt_tokens[follower] + 1
        sequences.row[follower] = allocation.fork(memory, sequences.row[s])
        queue.start(sequences, queues, follower)
        plan.forked[plan.counters[FORKED]] = follower
        plan.counters[FORKED] += 1
