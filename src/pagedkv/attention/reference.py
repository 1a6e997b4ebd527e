"""Attention as it is written in a book, in float64: what every kernel is tested against."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def reference_attend(
    q: NDArray[Any],
    k: NDArray[Any],
    v: NDArray[Any],
    *,
    scale: float | None = None,
    window: int | None = None,
    chunk: int | None = None,
    soft_cap: float | None = None,
    sinks: NDArray[Any] | None = None,
) -> NDArray[np.float64]:
    """One sequence whose last `len(q)` tokens ask, one token and one head after the other.

    `q` [tokens, heads, key_dim], `k` [length, kv_heads, key_dim], `v` [length, kv_heads,
    value_dim], all contiguous; the options are those of `KVStorage.attend`. Returns
    [tokens, heads, value_dim].

    >>> one = np.ones((1, 1, 8))
    >>> reference_attend(one, np.ones((3, 1, 8)), np.arange(24.0).reshape(3, 1, 8))[0, 0]
    array([ 8.,  9., 10., 11., 12., 13., 14., 15.])
    """
    q, k, v = (np.asarray(a, dtype=np.float64) for a in (q, k, v))
    num_tokens, num_heads, key_dim = q.shape
    length, num_kv_heads = k.shape[:2]
    scale = key_dim**-0.5 if scale is None else scale
    out = np.empty((num_tokens, num_heads, v.shape[2]))
    for i in range(num_tokens):
        position = length - num_tokens + i
        seen = range(first_attended(position, window, chunk), position + 1)
        for head in range(num_heads):
            kv_head = head // (num_heads // num_kv_heads)
            scores = k[seen, kv_head] @ q[i, head] * scale
            if soft_cap is not None:
                scores = soft_cap * np.tanh(scores / soft_cap)
            if sinks is not None:  # one more score, whose value is nothing
                scores = np.append(scores, sinks[head])
            weights = np.exp(scores - scores.max())
            weights /= weights.sum()
            out[i, head] = weights[: len(seen)] @ v[seen, kv_head]
    return out


def first_attended(position: int, window: int | None, chunk: int | None) -> int:
    """The first token that the token at `position` attends to.

    A window counts the token itself; a chunk begins at each multiple of `chunk`.

    >>> first_attended(10, window=4, chunk=None), first_attended(10, window=None, chunk=8)
    (7, 8)
    """
    first = 0
    if window is not None:
        first = max(first, position - window + 1)
    if chunk is not None:
        first = max(first, position // chunk * chunk)
    return first
