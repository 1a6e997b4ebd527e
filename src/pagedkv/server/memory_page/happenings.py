"""What steps did to the memory, for the page to show it as it happens.

An eviction is not among them: it is a cached block whose key went, which a look at the blocks
tells by itself.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pagedkv.compiling import compiled_in_place
from pagedkv.scheduling.continuous import SchedulerArrays
from pagedkv.scheduling.scheduler import ADMITTED, COPIES, FORKED, PREEMPTED, Plan
from pagedkv.server.memory_page.names import Names, name_of

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
        # As `HAPPENING_FIELDS`, with the generation of the column where a name will be.
        self._kept: list[tuple[int, int, int, int]] = []

    @staticmethod
    def are_any(plan: Plan) -> bool:
        """Whether the step did anything but add tokens, as few do. The engine waits for this."""
        num = plan.counters.tolist()
        return bool(num[COPIES] or num[ADMITTED] or num[PREEMPTED] or num[FORKED])

    def note(self, arrays: SchedulerArrays) -> None:
        """Note the newest step."""
        plan, generation, kept = arrays.plan, arrays.generation, self._kept
        num = plan.counters.tolist()
        # Item by item: of each kind there is rarely more than one.
        for i in range(num[PREEMPTED]):
            column = plan.preempted.item(i)
            kept.append((PREEMPTION, column, generation.item(column), 0))
        for i in range(num[ADMITTED]):
            column = plan.admitted.item(i)
            kept.append((ADMISSION, column, generation.item(column), plan.num_cached.item(i)))
        for i in range(num[COPIES]):
            kept.append((COPY, plan.copies.item(i, 0), plan.copies.item(i, 1), 0))
        for i in range(num[FORKED]):
            column = plan.forked.item(i)
            kept.append((FORK, column, generation.item(column), 0))
        del kept[MOST:]

    def taken(self, names: Names) -> NDArray[np.int32]:
        """All of them in order, int32 [n, 4], see `HAPPENING_FIELDS`; they are kept no more.

        Who has no name yet is named. `names` has room for all columns.
        """
        kept, self._kept = self._kept, []
        taken = np.array(kept, dtype=np.int64).reshape(-1, len(HAPPENING_FIELDS))
        _name(taken, names)
        return taken.astype(np.int32)


@compiled_in_place
def _name(happenings: NDArray[np.int64], names: Names) -> None:
    """Put names in the place of generations."""
    for i in range(len(happenings)):
        if happenings[i, 0] != COPY:
            happenings[i, 2] = name_of(names, happenings[i, 1], happenings[i, 2])
