"""Log probabilities of tokens under the model's own distribution.

They are those of the logits as the model gave them, before temperature, penalties and filters,
as in vLLM: what a sampling parameter changes is not the model's opinion. Tokens that a structured
output does not allow are out of it, as in vLLM too: the others share the whole probability.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from pagedkv.engine.largest import BLOCK, largest
from pagedkv.engine.sampling_params import MAX_LOGPROBS

Logits: TypeAlias = NDArray[np.float32]
"""[n, vocabulary], in host memory. A float32 tensor passes for one."""

_ENTRIES_AT_ONCE = 2**23  # 32 MB of logits: prompts are long, and copies of theirs large


@dataclass(frozen=True)
class TokenLogprob:
    """A token, how likely the model took it to be, and what it took to be likeliest there."""

    token_id: int
    logprob: float
    """Natural logarithm of the probability."""
    rank: int
    """1 for the likeliest token: 1 + the number of tokens that are likelier."""
    top: tuple[tuple[int, float], ...]
    """(token id, log probability) of the likeliest tokens, likeliest first."""


def token_logprobs(
    logits: Logits, token_ids: Sequence[int] | NDArray[np.int64], num_top: Sequence[int]
) -> list[TokenLogprob]:
    """Log probabilities of a token in each row of logits [n, vocabulary].

    `num_top`: how many of the likeliest to report for each, at most `MAX_LOGPROBS`.
    """
    logits = np.asarray(logits)
    ids = np.asarray(token_ids, dtype=np.int64)
    rows_at_once = max(1, _ENTRIES_AT_ONCE // logits.shape[1])
    found: list[TokenLogprob] = []
    for start in range(0, len(ids), rows_at_once):
        end = start + rows_at_once
        found += _token_logprobs(logits[start:end], ids[start:end], num_top[start:end])
    return found


def prompt_logprobs(
    logits: Logits, prompt_ids: Sequence[int], *, start: int, num_top: int
) -> list[TokenLogprob]:
    """Log probabilities of a prompt's tokens, by a chunk of it that was computed.

    logits [m, vocabulary] are those at positions `start` to `start + m`, and each foretells the
    token behind it: the answer is about tokens `start + 1` to at most `start + m + 1`, as far as
    the prompt goes. Nothing foretells token 0, and positions whose keys and values came from the
    cache have no logits: a prompt whose log probabilities are wanted must be computed whole.
    """
    targets = prompt_ids[start + 1 : start + 1 + len(logits)]
    return token_logprobs(logits[: len(targets)], targets, [num_top] * len(targets))


def log_probabilities(logits: Logits) -> Logits:
    """The log probabilities of all tokens, [n, vocabulary], as beam search takes them."""
    logits = np.asarray(logits)
    return logits - _log_totals(logits)[:, None].astype(np.float32)


def relative_weights(
    logits: Logits, largest: NDArray[np.float32], temperature: NDArray[np.float64]
) -> NDArray[np.float32]:
    """exp((x - largest) / temperature) of each row, padded with 0 to whole blocks of `BLOCK`.

    logits [n, vocabulary], largest and temperature [n].
    """
    num_rows, vocabulary = logits.shape
    padded = np.empty((num_rows, -(-vocabulary // BLOCK) * BLOCK), dtype=np.float32)
    padded[:, vocabulary:] = 0
    weights = padded[:, :vocabulary]
    np.subtract(logits, largest[:, None], out=weights)
    if (temperature != 1).any():
        weights /= temperature[:, None].astype(np.float32)
    np.exp(weights, out=weights)
    return padded


def total_weights(weights: NDArray[np.float32]) -> NDArray[np.float64]:
    """The sum of each row [n] of what `relative_weights` gave."""
    blocks = weights.reshape(len(weights), BLOCK, -1).sum(1)
    found: NDArray[np.float64] = blocks.sum(1, dtype=np.float64)
    return found


def _log_totals(logits: Logits) -> NDArray[np.float64]:
    """log of the sum of exp of each row [n]."""
    maxima = logits.max(1)
    totals = total_weights(relative_weights(logits, maxima, np.ones(len(logits))))
    found: NDArray[np.float64] = maxima + np.log(totals)
    return found


def _token_logprobs(
    logits: Logits, ids: NDArray[np.int64], num_top: Sequence[int]
) -> list[TokenLogprob]:
    chosen = np.take_along_axis(logits, ids[:, None], 1)
    ranks = 1 + np.count_nonzero(logits > chosen, axis=1)
    log_totals = _log_totals(logits)[:, None]
    top_ids: list[list[int]] = [[]] * len(ids)
    top_logprobs: list[list[float]] = [[]] * len(ids)
    if any(num_top):
        # Always as many, so that the order of equal ones does not depend on the other rows.
        values, places = largest(logits, MAX_LOGPROBS)
        top_ids, top_logprobs = places.tolist(), (values - log_totals).tolist()
    columns = zip(
        ids.tolist(),
        (chosen - log_totals)[:, 0].tolist(),
        ranks.tolist(),
        top_ids,
        top_logprobs,
        num_top,
    )
    return [
        TokenLogprob(token_id, logprob, rank, top=possible(likeliest[:k], their_logprobs[:k]))
        for token_id, logprob, rank, likeliest, their_logprobs, k in columns
    ]


def possible(token_ids: Sequence[int], logprobs: Sequence[float]) -> tuple[tuple[int, float], ...]:
    """Those that can be at all: where little is allowed there are fewer than were asked for."""
    return tuple(pair for pair in zip(token_ids, logprobs) if pair[1] > -math.inf)
