"""The choice of tokens where the logits lie, so that they need not cross to the host.

What is chosen here is what `sampling.sample` chooses for the same logits, for certain. The
likeliest token is the same wherever it is looked for. Drawing compares a random number with sums of
floats, and a device adds in another order than a CPU: so a row is drawn here only where the number
is farther from the next token's than the sums can differ. The few rows that are not so clear, and
those with penalties, bias or log probabilities, go to the host, whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from pagedkv.engine.device import on_host
from pagedkv.engine.largest import BLOCK
from pagedkv.engine.logprobs import TokenLogprob
from pagedkv.engine.sampling import (
    CANDIDATES,
    Draws,
    NotFinite,
    Sampled,
    SamplerState,
    draw_value,
    draws_of,
    sample,
)

_Ids: TypeAlias = NDArray[np.int64]

MARGIN = 2e-5
"""Of the whole weight: rows whose number is nearer than that to another token's go to the host.
The host's `exp` is off by 3e-7 at most and its sums of `BLOCK` weights by `BLOCK * 6e-8`, so each
of the two ends of a token's share by some 3e-6 of the whole."""

_ENTRIES_AT_ONCE = 2**23
"""64 MiB of weights in float64: some of that is there several times."""

_UNSURE = -1


def chooses_on_device(state: SamplerState) -> bool:
    """Whether the next token of a sequence is the likeliest of its logits as they are, and nobody
    wants to know how likely."""
    return state.params.is_greedy and _is_plain(state)


def _is_plain(state: SamplerState) -> bool:
    """Whether the logits are taken as they are, and nobody wants to know how likely a token was."""
    params = state.params
    return (
        not params.logit_bias
        and params.logprobs is None
        and state.counts is None
        and not state.bars_end
    )


def choose_greedily(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The likeliest token of each row of logits [k, vocabulary], and whether there is one.

    int64 [k], the lowest of several that are equally likely, and bool [k]: false where the largest
    logit is infinite or NaN. Nothing waits for the device.
    """
    # `max` would not promise which of several it names.
    token_ids = logits.argmax(1)
    largest = logits.gather(1, token_ids[:, None])[:, 0]
    return token_ids, largest.isfinite()


def sample_on_device(logits: torch.Tensor, states: Sequence[SamplerState]) -> Sampled:
    """What `sampling.sample` gives, for logits [n, vocabulary] on a device.

    Raises `NotFinite` for rows by which no token can be chosen.
    """
    n = len(states)
    token_ids = np.full(n, _UNSURE, dtype=np.int64)
    logprobs: list[TokenLogprob | None] = [None] * n
    plain = np.array([i for i, state in enumerate(states) if _is_plain(state)], dtype=np.int64)
    if len(plain):
        own = logits if len(plain) == n else logits[torch.from_numpy(plain).to(logits.device)]
        token_ids[plain] = _sampled(own, [states[i] for i in plain], plain)
    rest = np.flatnonzero(token_ids == _UNSURE)
    if len(rest):
        there = torch.from_numpy(rest).to(logits.device)
        others = [states[i] for i in rest.tolist()]
        try:
            found = sample(on_host(logits[there]).numpy(), others)
        except NotFinite as failure:
            raise NotFinite(rest[failure.rows].tolist()) from None
        token_ids[rest] = found.token_ids
        for i, logprob in zip(rest.tolist(), found.logprobs, strict=True):
            logprobs[i] = logprob
    return Sampled(token_ids, tuple(logprobs))


def _sampled(logits: torch.Tensor, states: Sequence[SamplerState], names: _Ids) -> _Ids:
    """Tokens [r] of rows that are taken as they are; `_UNSURE` for the host. `names` [r] are the
    rows of the step."""
    likeliest, _ = choose_greedily(logits)
    largest = on_host(logits.gather(1, likeliest[:, None])[:, 0]).numpy()
    bad = np.flatnonzero(~np.isfinite(largest))
    if len(bad):
        raise NotFinite(names[bad].tolist())
    token_ids: _Ids = likeliest.cpu().numpy().copy()
    drawn = np.array([i for i, s in enumerate(states) if not s.params.is_greedy], dtype=np.int64)
    if not len(drawn):
        return token_ids
    vocabulary = logits.shape[1]
    draws = draws_of([states[i] for i in drawn], largest[drawn], vocabulary)
    by_rank = draws.are_by_rank(vocabulary)
    for rows, draw in (
        (np.flatnonzero(~by_rank), _draw_from_all),
        (np.flatnonzero(by_rank), _draw_by_rank),
    ):
        at_once = max(1, _ENTRIES_AT_ONCE // vocabulary)
        for some in np.split(rows, range(at_once, len(rows), at_once)):
            if len(some):
                there = torch.from_numpy(drawn[some]).to(logits.device)
                token_ids[drawn[some]] = draw(logits[there], draws.of(some))
    return token_ids


def _weights(logits: torch.Tensor, draws: Draws) -> torch.Tensor:
    """exp((x - largest) / temperature), float64 [r, vocabulary], of float32 as the host has it."""
    numbers = np.stack([draws.largest, draws.temperature.astype(np.float32)], axis=1)
    largest, temperature = torch.from_numpy(numbers).to(logits.device).split(1, dim=1)
    return ((logits.float() - largest) / temperature).double().exp()


def _draw_from_all(logits: torch.Tensor, draws: Draws) -> _Ids:
    """One token of each row of all that min-p leaves, as `sampling` does: first one of the columns
    in which every `m`-th token stands, then one in it."""
    num_rows, vocabulary = logits.shape
    weights = _weights(logits, draws)
    numbers = np.stack([draws.min_p.astype(np.float32).astype(np.float64), draws.uniform], axis=1)
    least, uniform = torch.from_numpy(numbers).to(logits.device).split(1, dim=1)
    unsure = ((weights - least).abs() <= MARGIN * least) & (least > 0)
    weights = weights * (weights >= least)
    m = -(-vocabulary // BLOCK)
    columns = torch.nn.functional.pad(weights, (0, m * BLOCK - vocabulary))
    columns = columns.view(num_rows, BLOCK, m)
    sums = columns.sum(1)
    ends = sums.cumsum(1)
    whole = ends[:, -1:]
    target = uniform * whole
    column = (ends <= target).sum(1, keepdim=True).clamp(max=m - 1)
    before = (ends - sums).gather(1, column)
    inside = columns.gather(2, column[:, None].expand(-1, BLOCK, -1))[:, :, 0]
    upper = before + inside.cumsum(1)
    place = (upper <= target).sum(1, keepdim=True).clamp(max=BLOCK - 1)
    end = upper.gather(1, place)
    start = end - inside.gather(1, place)
    is_clear = torch.minimum(target - start, end - target) > MARGIN * whole
    is_clear &= ~unsure.any(1, keepdim=True)
    found: _Ids = torch.where(is_clear, place * m + column, _UNSURE)[:, 0].cpu().numpy()
    return found


def _draw_by_rank(logits: torch.Tensor, draws: Draws) -> _Ids:
    """One token of each row after top-k, top-p and min-p, among its largest logits."""
    vocabulary = logits.shape[1]
    values = on_host(logits.topk(min(CANDIDATES, vocabulary), dim=1).values).numpy()
    masses = np.zeros(len(logits))
    is_by_mass = (draws.top_k == vocabulary) & (draws.top_p < 1)
    rows = np.flatnonzero(is_by_mass)
    if len(rows):
        there = torch.from_numpy(rows).to(logits.device)
        masses[rows] = _weights(logits[there], draws.of(rows)).sum(1).cpu().numpy()
    value, nth, settled = draw_value(values, draws, masses, vocabulary)
    # Where top-p ends hangs on the mass; all else is of the values themselves, which are exact.
    weights = np.exp(
        (values - draws.largest[:, None]).astype(np.float64) / draws.temperature[:, None]
    )
    distance = np.abs(weights.cumsum(1) - weights - (draws.top_p * masses)[:, None]).min(1)
    is_clear = settled & (nth == 0) & ~(is_by_mass & (distance <= MARGIN * masses))
    wanted = torch.from_numpy(value).to(logits.device)
    # Of equal ones the first, as long as it is the first of them that was drawn.
    found: _Ids = (logits.float() == wanted[:, None]).int().argmax(1).cpu().numpy()
    return np.where(is_clear, found, _UNSURE)
