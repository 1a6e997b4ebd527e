"""How much a step computes and reads: what its time hangs on, measured or simulated."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from pagedkv.compiling import compiled_in_place


@compiled_in_place
def step_work(start: NDArray[Any], num_new: NDArray[Any], count: int) -> tuple[int, int, int, int]:
    """Prompt tokens, answers that go on by one, context tokens read, and pairs that attend.

    Of the first `count` sequences, integers: sequence `i` computes `num_new[i]` tokens behind the
    `start[i]` that it has. What is computed again after a preemption counts as prompt. Its
    attention reads all `start[i] + num_new[i]`, and each token makes a pair with itself and with
    each one before it.
    """
    prefill, decode, context, pairs = 0, 0, 0, 0
    for i in range(count):
        before, new = int(start[i]), int(num_new[i])
        if new == 1 and before > 0:
            decode += 1
        else:
            prefill += new
        context += before + new
        pairs += new * before + new * (new + 1) // 2
    return prefill, decode, context, pairs
