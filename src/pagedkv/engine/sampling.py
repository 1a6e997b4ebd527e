"""From logits to the next token of every running sequence.

A row of logits passes, in this order: `logit_bias`; penalties (repetition, frequency, presence);
end tokens barred until `min_tokens`; then, unless it is greedy, temperature, top-k, top-p and
min-p, which is the order of `transformers`. What top-p measures is the probability that top-k
has left. Log probabilities are those of the model's own distribution, before any of this.

What a row gives depends on the row, its parameters, its seed and its position alone: not on the
rest of the batch, and on no state that a preemption could lose.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pagedkv.engine.largest import BLOCK, largest_values
from pagedkv.engine.logprobs import (
    Logits,
    TokenLogprob,
    relative_weights,
    token_logprobs,
    total_weights,
)
from pagedkv.engine.random_stream import uniforms
from pagedkv.engine.sampling_params import SamplingParams
from pagedkv.engine.token_counts import TokenCounts
from pagedkv.errors import PagedKVError

Ids: TypeAlias = NDArray[np.int64]
Numbers: TypeAlias = NDArray[np.float64]

CANDIDATES = 256
"""Filtered rows are settled among this many largest logits, or else among all of them."""

_COLDEST, _HOTTEST = 1e-30, 1e30  # so that 0 / T is 0, and -inf / T is -inf, in float32


class NotFinite(PagedKVError):
    """The model gave logits that no token can be chosen by; `rows` says for which sequences."""

    def __init__(self, rows: Sequence[int]) -> None:
        super().__init__(
            f"the model gave NaN or infinite logits for {len(rows)} of the sequences in the step: "
            "load it in float32 or bfloat16"
        )
        self.rows = rows


@dataclass(frozen=True)
class Sampled:
    """The next token of each sequence of a step."""

    token_ids: Ids
    """[n]."""
    logprobs: tuple[TokenLogprob | None, ...]
    """n of them: None where the parameters ask for none."""


class SamplerState:
    """What the choice of one sequence's next token depends on, besides the logits.

    `seed` and `sample` (0 for the first of `n` samples of a prompt) name the stream of random
    numbers. `end_ids` are barred until `min_tokens`: the model's end-of-sequence tokens; the
    parameters' `stop_token_ids` are added. With None nothing is barred. The state is small, and
    goes with its sequence through preemptions: it is never computed again.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int] = (),
        *,
        seed: int,
        sample: int = 0,
        end_ids: Collection[int] | None = (),
    ) -> None:
        self.params = params
        self.seed = seed
        self.sample = sample
        self.num_output_tokens = 0
        self.counts: TokenCounts | None = None
        if params.has_penalties:
            self.counts = TokenCounts(prompt_ids if params.repetition_penalty != 1 else ())
        self.end_ids: tuple[int, ...] = ()
        if params.min_tokens and end_ids is not None:
            self.end_ids = tuple(sorted({*end_ids, *params.stop_token_ids}))

    def append(self, token_id: int) -> None:
        """Note the token that was chosen."""
        self.num_output_tokens += 1
        if self.counts is not None:
            self.counts.append(token_id)

    @property
    def bars_end(self) -> bool:
        """Whether end tokens cannot be chosen yet."""
        return self.bars_end_at(self.num_output_tokens)

    def bars_end_at(self, position: int) -> bool:
        """Whether the token of that place in the output cannot be an end token."""
        return bool(self.end_ids) and position < self.params.min_tokens


def sample(logits: Logits, states: Sequence[SamplerState]) -> Sampled:
    """Choose the next token of n sequences by their logits [n, vocabulary], which stay as they are.

    `logits`: float32, an array or a tensor in host memory, which is not copied. The caller appends
    each token to its state. Raises `NotFinite` for rows by which no token can be chosen. Where all
    are greedy, this is one look at each logit.
    """
    logits = np.asarray(logits)
    adjusted = adjust_logits(logits, states)
    drawn = [i for i, state in enumerate(states) if not state.params.is_greedy]
    # The first of several largest, and a NaN before any number: as torch's, in a tenth of the time.
    token_ids = adjusted.argmax(1).astype(np.int64, copy=False)
    largest = adjusted[np.arange(len(states)), token_ids]
    bad = np.flatnonzero(~np.isfinite(largest))
    if len(bad):
        raise NotFinite(bad.tolist())
    if drawn:
        token_ids[drawn] = _draw(_rows(adjusted, drawn), largest[drawn], [states[i] for i in drawn])
    return Sampled(token_ids=token_ids, logprobs=_logprobs(logits, token_ids, states))


def _rows(logits: Logits, rows: Sequence[int] | Ids) -> Logits:
    """Some rows, each at most once and in their order: no copy if these are all."""
    return logits if len(rows) == len(logits) else logits[rows]


def _logprobs(
    logits: Logits, token_ids: Ids, states: Sequence[SamplerState]
) -> tuple[TokenLogprob | None, ...]:
    wanted = [i for i, state in enumerate(states) if state.params.logprobs is not None]
    found: list[TokenLogprob | None] = [None] * len(states)
    if wanted:
        num_top = [states[i].params.logprobs or 0 for i in wanted]
        logprobs = token_logprobs(_rows(logits, wanted), token_ids[wanted], num_top)
        for i, logprob in zip(wanted, logprobs):
            found[i] = logprob
    return tuple(found)


# Bias, penalties, barred tokens -------------------------------------------------------------------


def adjust_logits(logits: Logits, states: Sequence[SamplerState]) -> Logits:
    """Logits [n, vocabulary] after bias, penalties and `min_tokens`, before anything is drawn.

    The same array where there are none of these, else a copy.

    Of a row only the tokens concerned are touched, those of all rows in one go.
    """
    biased = [i for i, state in enumerate(states) if state.params.logit_bias]
    penalised = [i for i, state in enumerate(states) if state.counts is not None]
    barred = [i for i, state in enumerate(states) if state.bars_end]
    if not (biased or penalised or barred):
        return logits
    logits = logits.copy()
    if biased:
        _add_bias(logits, states, biased)
    if penalised:
        _penalise(logits, states, penalised)
    if barred:
        rows = np.repeat(barred, [len(states[i].end_ids) for i in barred])
        ids = np.concatenate([states[i].end_ids for i in barred])
        within = ids < logits.shape[1]
        logits[rows[within], ids[within]] = -np.inf
    return logits


def _add_bias(logits: Logits, states: Sequence[SamplerState], biased: list[int]) -> None:
    biases = [states[i].params.logit_bias or {} for i in biased]
    rows = np.repeat(biased, [len(bias) for bias in biases])
    ids = np.concatenate([np.fromiter(bias, dtype=np.int64) for bias in biases])
    values = np.concatenate([np.fromiter(bias.values(), dtype=np.float32) for bias in biases])
    within = ids < logits.shape[1]
    logits[rows[within], ids[within]] += values[within]


def _penalise(logits: Logits, states: Sequence[SamplerState], penalised: list[int]) -> None:
    """Repetition first, then frequency and presence, as vLLM does."""
    counts = [states[i].counts or TokenCounts() for i in penalised]
    params = [states[i].params for i in penalised]
    sizes = [len(count.token_ids) for count in counts]
    rows = np.repeat(penalised, sizes)
    ids = np.concatenate([count.token_ids for count in counts])
    times = np.concatenate([count.output_counts for count in counts])
    repetition = np.repeat(np.array([p.repetition_penalty for p in params], np.float32), sizes)
    frequency = np.repeat([p.frequency_penalty for p in params], sizes)
    presence = np.repeat([p.presence_penalty for p in params], sizes)
    taken = (frequency * times + presence * (times > 0)).astype(np.float32)
    within = ids < logits.shape[1]  # a tokenizer may know more tokens than the model
    places = rows[within], ids[within]
    values, factors = logits[places], repetition[within]
    values = np.where(values < 0, values * factors, values / factors)
    logits[places] = values - taken[within]


# Drawing ------------------------------------------------------------------------------------------


class Draws(NamedTuple):
    """What r rows are drawn by, each [r]."""

    temperature: Numbers
    top_p: Numbers
    top_k: Ids
    """As many as the vocabulary has where all are kept."""
    min_p: Numbers
    uniform: Numbers
    """The random number of each, in [0, 1)."""
    largest: NDArray[np.float32]
    """The largest logit of each."""

    def are_by_rank(self, vocabulary: int) -> NDArray[np.bool_]:
        """[r]: whether tokens are left out by their rank: by top-k or top-p."""
        return (self.top_k < vocabulary) | (self.top_p < 1)

    def of(self, rows: Ids) -> Draws:
        return Draws(
            temperature=self.temperature[rows],
            top_p=self.top_p[rows],
            top_k=self.top_k[rows],
            min_p=self.min_p[rows],
            uniform=self.uniform[rows],
            largest=self.largest[rows],
        )


def draws_of(
    states: Sequence[SamplerState],
    positions: Sequence[int],
    largest: NDArray[np.float32],
    vocabulary: int,
) -> Draws:
    """What the next token of each is drawn by; `positions` [r]: its place in the output, and
    `largest` [r]: the largest logit of each."""
    params = [state.params for state in states]
    return Draws(
        temperature=np.array([min(max(p.temperature, _COLDEST), _HOTTEST) for p in params]),
        top_p=np.array([p.top_p for p in params]),
        top_k=np.array([p.top_k if 0 < p.top_k < vocabulary else vocabulary for p in params]),
        min_p=np.array([p.min_p for p in params]),
        uniform=uniforms(
            np.array([state.seed for state in states], dtype=np.uint64),
            np.array([state.sample for state in states], dtype=np.uint64),
            np.array(positions, dtype=np.uint64),
        ),
        largest=largest,
    )


def _draw(logits: Logits, largest: NDArray[np.float32], states: Sequence[SamplerState]) -> Ids:
    """Draw a token for each row of logits [r, vocabulary]; largest [r]: their largest."""
    vocabulary = logits.shape[1]
    positions = [state.num_output_tokens for state in states]
    draws = draws_of(states, positions, largest, vocabulary)
    token_ids = np.empty(len(states), dtype=np.int64)
    by_rank = draws.are_by_rank(vocabulary)
    rows = np.flatnonzero(~by_rank)
    if len(rows):
        token_ids[rows] = _draw_from_all(_rows(logits, rows), draws.of(rows))
    rows = np.flatnonzero(by_rank)
    if len(rows):
        token_ids[rows] = _draw_by_rank(_rows(logits, rows), draws.of(rows))
    return token_ids


def _draw_from_all(logits: Logits, draws: Draws) -> Ids:
    """One token of each row [r], of all tokens that min-p leaves.

    The number drawn picks a block by the blocks' weights, then a token inside it, so that no
    running sum goes over the whole vocabulary.
    """
    weights = relative_weights(logits, draws.largest, draws.temperature)
    if draws.min_p.any():
        weights *= weights >= draws.min_p[:, None].astype(np.float32)
    blocks = weights.reshape(len(logits), BLOCK, -1)
    block, uniform = _pick(blocks.sum(1).astype(np.float64), draws.uniform)
    inside = blocks[np.arange(len(logits)), :, block].astype(np.float64)
    place, _ = _pick(inside, uniform)
    return place * blocks.shape[2] + block


def _draw_by_rank(logits: Logits, draws: Draws) -> Ids:
    """One token of each row [r] after top-k, top-p and min-p."""
    vocabulary = logits.shape[1]
    masses = np.zeros(len(logits))
    rows = np.flatnonzero(draws.top_k == vocabulary)
    if len(rows):
        weights = relative_weights(
            _rows(logits, rows), draws.largest[rows], draws.temperature[rows]
        )
        masses[rows] = total_weights(weights)
    values = largest_values(logits, CANDIDATES)
    value, nth, settled = draw_value(values, draws, masses, vocabulary)
    rest = np.flatnonzero(~settled)
    if len(rest):
        values = largest_values(logits[rest], vocabulary)
        value[rest], nth[rest], _ = draw_value(values, draws.of(rest), masses[rest], vocabulary)
    equal = logits == value[:, None]
    token_ids: Ids = equal.argmax(1)
    for row in np.flatnonzero(nth):
        token_ids[row] = np.flatnonzero(equal[row])[nth[row]]
    return token_ids


def draw_value(
    values: Logits, draws: Draws, masses: Numbers, vocabulary: int
) -> tuple[NDArray[np.float32], Ids, NDArray[np.bool_]]:
    """Draw among the largest logits [r, k] of each row, largest first.

    Gives the logit drawn, which one it is of those that equal it (0 for the first), and whether
    the row is settled, all [r]: whether what the filters keep ends among these logits. What is
    drawn from a row that is not settled means nothing. `masses` [r]: the weight of the whole
    vocabulary on a scale on which the largest logit weighs 1, where there is no top-k.
    """
    width = values.shape[1]
    temperature = draws.temperature[:, None]
    weights = np.exp((values - draws.largest[:, None]).astype(np.float64) / temperature)
    last = values[:, -1]

    has_top_k = draws.top_k < vocabulary
    kth = np.take_along_axis(values, np.minimum(draws.top_k, width)[:, None] - 1, 1)
    keep = (values >= kth) | ~has_top_k[:, None]
    kept = np.where(keep, weights, 0.0)
    ends = kept.cumsum(1)
    mass = np.where(has_top_k, ends[:, -1], masses)
    before = ends - kept
    keep &= (before < (draws.top_p * mass)[:, None]) | (draws.top_p == 1)[:, None]
    keep &= weights >= draws.min_p[:, None]
    keep[:, 0] = True

    place, _ = _pick(np.where(keep, weights, 0.0), draws.uniform)
    value = values[np.arange(len(values)), place]
    nth = place - (values > value[:, None]).sum(1)
    # Where the k-th largest equals the last one here, more that equal it may lie beyond.
    settled = ~keep[:, -1] & ~(has_top_k & (kth[:, 0] <= last))
    settled |= np.isneginf(last)  # nothing beyond can be drawn
    return value, nth, settled | (width == vocabulary)


def _pick(weights: Numbers, uniform: Numbers) -> tuple[Ids, Numbers]:
    """A place in each row, as likely as its weight; and how far into that weight, in [0, 1).

    Weights [r, m], uniform [r]. A place of weight 0 is never picked.
    """
    ends = weights.cumsum(1)
    target = np.minimum(uniform * ends[:, -1], np.nextafter(ends[:, -1], 0))
    # The first end above the target.
    place = (ends <= target[:, None]).sum(1)
    rows = np.arange(len(weights))
    weight = weights[rows, place]
    inside = (target - (ends[rows, place] - weight)) / weight
    return place, np.clip(inside, 0, np.nextafter(1.0, 0))
