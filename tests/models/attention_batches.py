"""What attention is asked for: strategies that the tests of every kernel draw from."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st


@st.composite
def options(
    draw: Any, num_heads: int, *, key_dim: int | None = None, farthest: int = 50
) -> dict[str, Any]:
    """Options of `attend`: none, some or all; windows and chunks of up to `farthest` tokens.

    A scale only where `key_dim` is given.
    """
    some: dict[str, Any] = {}
    if key_dim is not None and draw(st.booleans()):
        # Scores in the hundreds would be off by 1e-5 for being floats, whoever computes them.
        some["scale"] = draw(st.sampled_from([0.1, 0.5, 2.0])) * key_dim**-0.5
    for name in ("window", "chunk"):
        if draw(st.booleans()):
            some[name] = draw(st.integers(1, farthest))
    if draw(st.booleans()):
        some["soft_cap"] = draw(st.sampled_from([0.5, 5.0, 50.0]))
    if draw(st.booleans()):
        sinks = st.lists(st.floats(-20, 90), min_size=num_heads, max_size=num_heads)
        some["sinks"] = np.array(draw(sinks))
    return some


@st.composite
def sequences(
    draw: Any,
    *,
    lengths: st.SearchStrategy[int],
    most_new: tuple[int, ...] = (1, 10**6),
    most: int = 5,
) -> list[tuple[int, int]]:
    """A batch of up to `most` (length, new tokens): decodes, whole prompts, chunks of prompts and
    sequences that do not ask. Chunks have up to one of `most_new` tokens."""
    made = []
    for _ in range(draw(st.integers(1, most))):
        length = draw(lengths)
        longest = min(draw(st.sampled_from(most_new)), length)
        new = st.just(1) if longest == 1 else st.just(longest) | st.integers(0, longest)
        made.append((length, draw(new)))
    return made
