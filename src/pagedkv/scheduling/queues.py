"""The sequences that the scheduler knows, and the two queues they stand in.

Sequences are numbered by their place in the columns, in order of arrival. The waiting queue is
a ring and holds them in that order: a preempted sequence goes back to its front, being older
than all that wait. The running ones stand in order of admission, so the youngest is the last.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pagedkv.compiling import compiled_in_place

EXPECTED, WAITING, RUNNING, FINISHED = 0, 1, 2, 3
"""States of a sequence; one is expected before it arrives, and while it waits to be forked or, as a
beam without blocks, for the other beams."""

NO_ROW = -1


class Sequences(NamedTuple):
    """Columns over sequences."""

    state: NDArray[np.int8]
    prompt_tokens: NDArray[np.int64]
    total_tokens: NDArray[np.int64]  # prompt and output tokens when it finishes
    num_tokens: NDArray[np.int64]  # prompt and output tokens that exist so far
    row: NDArray[np.int64]  # its row in the block tables while it runs
    num_admissions: NDArray[np.int64]
    num_followers: NDArray[np.int64]  # sequences after it that fork from it after its prompt
    is_beam: NDArray[np.bool_]  # its next token is chosen together with those of other beams
    first_key: NDArray[np.int64]  # its block keys are keys[first_key : first_key + num_keys]
    num_keys: NDArray[np.int64]
    keys: NDArray[np.uint64]  # [all keys, 2]


WAITING_HEAD, WAITING_SIZE, RUNNING_SIZE, BLOCKED, BLOCKED_NEED, BLOCKED_MARK = 0, 1, 2, 3, 4, 5
"""Places in `Queues.counters`: the ring's head and fill, the running sequences, and what is known
of the sequence at the head if it was found not to fit (see `scheduler`)."""


class Queues(NamedTuple):
    """Who waits and who runs, as numbers of sequences."""

    waiting: NDArray[np.int64]  # ring
    running: NDArray[np.int64]
    counters: NDArray[np.int64]


def make_sequences(
    prompt_tokens: NDArray[np.int64],
    total_tokens: NDArray[np.int64],
    num_followers: NDArray[np.int64] | None = None,
    first_key: NDArray[np.int64] | None = None,
    num_keys: NDArray[np.int64] | None = None,
    keys: NDArray[np.uint64] | None = None,
) -> Sequences:
    """Columns for sequences that are all still expected; no keys means no prefix caching."""
    n = len(prompt_tokens)
    none = np.zeros(n, dtype=np.int64)
    return Sequences(
        state=np.full(n, EXPECTED, dtype=np.int8),
        prompt_tokens=prompt_tokens,
        total_tokens=total_tokens,
        num_tokens=prompt_tokens.copy(),
        row=np.full(n, NO_ROW, dtype=np.int64),
        num_admissions=np.zeros(n, dtype=np.int64),
        num_followers=none if num_followers is None else num_followers,
        is_beam=np.zeros(n, dtype=np.bool_),
        first_key=none if first_key is None else first_key,
        num_keys=none if num_keys is None else num_keys,
        keys=np.zeros((0, 2), dtype=np.uint64) if keys is None else keys,
    )


def make_queues(num_sequences: int, max_num_seqs: int) -> Queues:
    """Empty queues for up to `num_sequences` waiting and `max_num_seqs` running sequences."""
    queues = Queues(
        waiting=np.zeros(max(num_sequences, 1), dtype=np.int64),
        running=np.zeros(max_num_seqs, dtype=np.int64),
        counters=np.zeros(6, dtype=np.int64),
    )
    queues.counters[BLOCKED] = -1
    return queues


@compiled_in_place
def push_back(sequences: Sequences, queues: Queues, s: int) -> None:
    """Sequence `s` arrives and waits behind all others."""
    place = (queues.counters[WAITING_HEAD] + queues.counters[WAITING_SIZE]) % len(queues.waiting)
    queues.waiting[place] = s
    queues.counters[WAITING_SIZE] += 1
    sequences.state[s] = WAITING


@compiled_in_place
def push_front(sequences: Sequences, queues: Queues, s: int) -> None:
    """Sequence `s` waits again, before all others."""
    head = (queues.counters[WAITING_HEAD] - 1) % len(queues.waiting)
    queues.waiting[head] = s
    queues.counters[WAITING_HEAD] = head
    queues.counters[WAITING_SIZE] += 1
    sequences.state[s] = WAITING


@compiled_in_place
def leave_waiting(queues: Queues, s: int) -> None:
    """Sequence `s` waits no longer; those behind it move up."""
    head, capacity = queues.counters[WAITING_HEAD], len(queues.waiting)
    kept = 0
    for i in range(queues.counters[WAITING_SIZE]):
        waiting = queues.waiting[(head + i) % capacity]
        if waiting != s:
            queues.waiting[(head + kept) % capacity] = waiting
            kept += 1
    queues.counters[WAITING_SIZE] = kept


@compiled_in_place
def start_first(sequences: Sequences, queues: Queues) -> int:
    """The sequence at the head of the waiting queue runs from now on."""
    head = queues.counters[WAITING_HEAD]
    s = int(queues.waiting[head])
    queues.counters[WAITING_HEAD] = (head + 1) % len(queues.waiting)
    queues.counters[WAITING_SIZE] -= 1
    start(sequences, queues, s)
    return s


@compiled_in_place
def start(sequences: Sequences, queues: Queues, s: int) -> None:
    """Sequence `s` runs from now on, as the youngest."""
    queues.running[queues.counters[RUNNING_SIZE]] = s
    queues.counters[RUNNING_SIZE] += 1
    sequences.state[s] = RUNNING
    sequences.num_admissions[s] += 1


@compiled_in_place
def leave_running(queues: Queues, s: int) -> None:
    """Sequence `s` runs no longer; the younger ones move up."""
    size = queues.counters[RUNNING_SIZE]
    place = size - 1
    while queues.running[place] != s:
        place -= 1
    for i in range(place + 1, size):
        queues.running[i - 1] = queues.running[i]
    queues.counters[RUNNING_SIZE] = size - 1


@compiled_in_place
def drop_finished(sequences: Sequences, queues: Queues) -> None:
    """Close the gaps that finished sequences leave among the running ones."""
    kept = 0
    for i in range(queues.counters[RUNNING_SIZE]):
        s = queues.running[i]
        if sequences.state[s] == RUNNING:
            queues.running[kept] = s
            kept += 1
    queues.counters[RUNNING_SIZE] = kept
