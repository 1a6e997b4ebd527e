"""What steps did to the memory, for the page to show it as it happens.

An eviction is not among them: it is a cached block whose key went, which a look at the blocks
tells by itself.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from pagedkv.scheduling.continuous import SchedulerArrays
from pagedkv.scheduling.scheduler import ADMITTED, COPIES, FORKED, PREEMPTED

ADMISSION, FORK, COPY, PREEMPTION = 0, 1, 2, 3
"""Kinds of happening: a sequence began, or began again, with so many cached tokens; one began with
all blocks of the one before it; a shared block was copied before it was written to; a sequence
gave way."""

HAPPENING_FIELDS = ("kind", "column", "name", "what")
"""Of a happening; column and name tell a sequence as in `changes.SEQUENCE_FIELDS`. `what` is, of an
admission, the number of cached tokens. Of a copy, column and name are the blocks from and to."""

MOST = 256
"""Happenings that are kept between two looks; of more than that nobody could see one."""


class Happenings:
    """Collects what steps did until somebody takes it."""

    def __init__(self) -> None:
        self._kept: list[tuple[int, int, int, int]] = []

    def note(self, arrays: SchedulerArrays, name_of: Callable[[int], int]) -> None:
        """Note the newest step; `name_of` names the sequence of a column."""
        plan = arrays.plan
        if not any(plan.counters[COPIES : FORKED + 1].tolist()):
            return  # as most steps, which only add a token to each sequence
        kept = self._kept
        for i in range(plan.counters[PREEMPTED]):
            column = int(plan.preempted[i])
            kept.append((PREEMPTION, column, name_of(column), 0))
        for i in range(plan.counters[ADMITTED]):
            column = int(plan.admitted[i])
            kept.append((ADMISSION, column, name_of(column), int(plan.num_cached[i])))
        for source, target in plan.copies[: plan.counters[COPIES]].tolist():
            kept.append((COPY, source, target, 0))
        for i in range(plan.counters[FORKED]):
            column = int(plan.forked[i])
            kept.append((FORK, column, name_of(column), 0))
        del kept[MOST:]

    def taken(self) -> NDArray[np.int32]:
        """All of them in order, int32 [n, 4], see `HAPPENING_FIELDS`; they are kept no more."""
        taken, self._kept = self._kept, []
        return np.array(taken, dtype=np.int32).reshape(-1, len(HAPPENING_FIELDS))
