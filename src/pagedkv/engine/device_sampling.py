"""The choice of tokens where the logits lie, so that the next step can take them from there.

What is chosen here is what `sampling.sample` chooses for the same logits. The likeliest token is
the same wherever it is looked for, and so are bias, penalties and barred tokens, which are single
operations on float32. Drawing compares a random number with sums of floats, and a device adds in
another order than a CPU. So the device draws, and says of each row whether the number was farther
from the next token's than the sums can differ:

    token a      | token b                    | token c
    ─────────────┼────────────────────────────┼───────────
               └ ┴ ┘ MARGIN           ▲ number: for certain

The next step is computed with what was drawn in any case. The few rows that are not certain are
drawn once more on the host, when the step is read (`Choice.conclude`); hardly ever is it another
token, and then whoever began the next step with it computes that once more.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from pagedkv.engine.device import Read, rows_aside, uploaded
from pagedkv.engine.device_counts import DeviceCounts
from pagedkv.engine.device_logprobs import DeviceLogprobs
from pagedkv.engine.largest import BLOCK
from pagedkv.engine.logprobs import TokenLogprob
from pagedkv.engine.sampling import (
    CANDIDATES,
    Draws,
    NotFinite,
    SamplerState,
    draws_of,
    sample,
)
from pagedkv.engine.turn import Turn

_Ids: TypeAlias = NDArray[np.int64]

MARGIN = 6e-6
"""Of the whole weight: a number that is nearer than that to another token's is not certain.

The host's `exp` is off by 3e-7 of a weight at most, its sums of `BLOCK` float32 by 1.9e-6, so a sum
of weights by 2.2e-6 of the whole. Both the number times the whole and the end of a token's share
are such sums, 4.4e-6 apart at most; a device's `exp`, off by two units in the last place, adds
2.4e-7 to each of them."""

MIN_P_MARGIN = 1e-6
"""Of min-p: the same where a weight in float32 is compared with it."""

FINE_MARGIN = 1e-9
"""The same where nothing but float64 is added: up to a vocabulary of numbers, 1e-16 each."""

_ENTRIES_AT_ONCE = 2**26
"""256 MiB of weights in float32: as much is there two or three times."""

_SORTED_AT_ONCE = 2**22
"""The same where rows are sorted as a whole, and lie there in float64 a dozen times."""

_CERTAIN, _UNCERTAIN, _WIDE, _NOT_FINITE = range(4)
"""What is known of a row's token. `_WIDE`: what the filters keep does not end among the largest
`CANDIDATES`, so that it was not drawn at all."""


class Concluded(NamedTuple):
    """The next token of each sequence of a step, for certain."""

    token_ids: _Ids
    """[k]."""
    logprobs: tuple[TokenLogprob | None, ...]
    """k of them: None where the parameters ask for none."""
    mistaken: _Ids
    """Those of the k that `Choice.said` has another token for."""


@dataclass(frozen=True)
class Choice:
    """What the sequences of a step say, while the device may still compute it."""

    said: torch.Tensor
    """int64 [k], on the device: certain but for the few that `conclude` finds."""
    turns: tuple[Turn | None, ...]
    sampler: DeviceSampler
    logits: torch.Tensor
    """[k, vocabulary]; empty where nothing is drawn."""
    read: Read
    """int64 [2, k]: `said`, and what is known of it."""
    logprobs: DeviceLogprobs | None

    def conclude(self, wanted: _Ids) -> Concluded:
        """Read what is said by `wanted`, places among the k; waits for that and no later work.

        What the others say means nothing. All tokens before these must be known to the states.
        Raises `NotFinite` for rows by which no token can be chosen.
        """
        said, known = self.read.numpy()
        token_ids = said.copy()
        is_wanted = np.zeros(len(said), dtype=np.bool_)
        is_wanted[wanted] = True
        bad = np.flatnonzero(is_wanted & (known == _NOT_FINITE))
        if len(bad):
            raise NotFinite(bad.tolist())
        logprobs: list[TokenLogprob | None] = [None] * len(said)
        if self.logprobs is not None:
            for place, logprob in self.logprobs.read(token_ids):
                logprobs[place] = logprob
        rows = np.flatnonzero(is_wanted & (known != _CERTAIN))
        if len(rows):
            states = [turn.state for i in rows.tolist() if (turn := self.turns[i]) is not None]
            found = sample(rows_aside(self.logits, rows, self.read).numpy(), states)
            token_ids[rows] = found.token_ids
            for i, own in zip(rows.tolist(), found.logprobs, strict=True):
                logprobs[i] = own
        for i in np.flatnonzero(known == _WIDE).tolist():
            turn = self.turns[i]
            if turn is not None:
                self.sampler.wide.add(turn.state)
        return Concluded(token_ids, tuple(logprobs), rows[said[rows] != token_ids[rows]])


class DeviceSampler:
    """Chooses tokens on one device. Steps come in order, and one thread at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._counts = DeviceCounts(device)
        self.wide: weakref.WeakSet[SamplerState] = weakref.WeakSet()
        """Whose filters have kept more than `CANDIDATES`: their rows are sorted whole."""

    def forget(self, state: SamplerState) -> None:
        """It was taken to have said what it did not."""
        self._counts.forget(state)

    @torch.inference_mode()
    def choose(
        self,
        logits: torch.Tensor,
        turns: Sequence[Turn | None],
        said: torch.Tensor | None = None,
        *,
        is_overwritten: bool = False,
    ) -> Choice:
        """Choose a token by each row of logits [k, vocabulary]; nothing waits for the device.

        `turns`: k of them, None for a row of which nobody will ask. `said` int64 [k']: what the
        step before says, for turns that await it. `is_overwritten`: whether the logits may be
        others by the time that the choice is concluded.
        """
        adjusted = self._adjusted(logits, turns, said)
        token_ids = adjusted.argmax(1)  # `max` would not promise which of several it names
        largest = adjusted.gather(1, token_ids[:, None])
        known = _if(~largest[:, 0].isfinite(), _NOT_FINITE)
        drawn = [i for i, t in enumerate(turns) if t is not None and not t.state.params.is_greedy]
        if drawn:
            self._draw(adjusted, largest, drawn, turns, token_ids, known)
        kept = logits[:0]
        if drawn:
            kept = logits.clone() if is_overwritten else logits
        told = [
            (i, t.state.params.logprobs)
            for i, t in enumerate(turns)
            if t is not None and t.state.params.logprobs is not None
        ]
        return Choice(
            said=token_ids,
            turns=tuple(turns),
            sampler=self,
            logits=kept,
            read=Read(torch.stack([token_ids, known])),
            logprobs=DeviceLogprobs(logits, token_ids, told) if told else None,
        )

    # Bias, penalties, barred tokens ---------------------------------------------------------------

    def _adjusted(
        self, logits: torch.Tensor, turns: Sequence[Turn | None], said: torch.Tensor | None
    ) -> torch.Tensor:
        """What `sampling.adjust_logits` gives; the logits themselves where nothing is to be done.

        A copy has a column behind the vocabulary, where goes what is nobody's.
        """
        vocabulary = logits.shape[1]
        biased, barred, counted = [], [], []
        for i, turn in enumerate(turns):
            if turn is None:
                continue
            state = turn.state
            biased += [(i, *pair) for pair in (state.params.logit_bias or {}).items()]
            if state.bars_end_at(turn.position):
                barred += [(i, token_id) for token_id in state.end_ids]
            if state.counts is not None:
                counted.append(i)
        if not (biased or barred or counted):
            return logits
        own = torch.empty((len(logits), vocabulary + 1), dtype=torch.float32, device=logits.device)
        own[:, :vocabulary].copy_(logits)
        bias = np.array([value for *_, value in biased], dtype=np.float64)
        (bias_rows, bias_ids), biases, (bar_rows, bar_ids) = uploaded(
            [
                _places([pair[:2] for pair in biased], vocabulary),
                bias.view(np.int64),
                _places(barred, vocabulary),
            ],
            logits.device,
        )
        if biased:
            values = biases.view(torch.float64).float()
            own[bias_rows, bias_ids] = own[bias_rows, bias_ids] + values
        if counted:
            self._penalise(own, counted, turns, said)
        if barred:
            own.index_put_((bar_rows, bar_ids), own.new_full((), -torch.inf))
        return own[:, :vocabulary]

    def _penalise(
        self,
        own: torch.Tensor,
        rows: list[int],
        turns: Sequence[Turn | None],
        said: torch.Tensor | None,
    ) -> None:
        counted = [turn for i in rows if (turn := turns[i]) is not None]
        ids, times = self._counts.of(counted, said)
        params = [turn.state.params for turn in counted]
        penalties = np.array(
            [
                [p.repetition_penalty for p in params],
                [p.frequency_penalty for p in params],
                [p.presence_penalty for p in params],
            ]
        )
        there, sent = uploaded(
            [np.array(rows, dtype=np.int64), penalties.view(np.int64)], own.device
        )
        repetition, frequency, presence = sent.view(torch.float64)[:, :, None]
        factors = repetition.float()
        behind = own.shape[1] - 1
        columns = ids.masked_fill((ids < 0) | (ids > behind), behind)
        taken = (frequency * times + presence * (times > 0)).float()
        places = there[:, None], columns
        values = own[places]
        own[places] = torch.where(values < 0, values * factors, values / factors) - taken

    # Drawing --------------------------------------------------------------------------------------

    def _draw(
        self,
        logits: torch.Tensor,
        largest: torch.Tensor,
        rows: list[int],
        turns: Sequence[Turn | None],
        token_ids: torch.Tensor,
        known: torch.Tensor,
    ) -> None:
        """Draw for `rows` of logits [k, vocabulary]: into `token_ids`, and what is known of it."""
        vocabulary = logits.shape[1]
        drawn = [turn for i in rows if (turn := turns[i]) is not None]
        states = [turn.state for turn in drawn]
        draws = draws_of(
            states,
            [turn.position for turn in drawn],
            np.zeros(len(drawn), dtype=np.float32),  # nobody here knows them
            vocabulary,
        )
        by_rank = draws.are_by_rank(vocabulary)
        is_wide = np.array([state in self.wide for state in states])
        for own, draw, at_once in (
            (~by_rank, _draw_from_all, _ENTRIES_AT_ONCE),
            (by_rank & ~is_wide, _draw_by_rank, _ENTRIES_AT_ONCE),
            (by_rank & is_wide, _draw_by_rank_of_all, _SORTED_AT_ONCE),
        ):
            places = np.flatnonzero(own)
            num = max(1, at_once // vocabulary)
            for start in range(0, len(places), num):
                some = draws.of(places[start : start + num])
                there, sent = uploaded(
                    [np.array(rows, dtype=np.int64)[places[start : start + num]], _packed(some)],
                    logits.device,
                )
                columns = sent.view(torch.float64)[:, :, None].unbind()
                numbers = _Numbers._make([*columns, largest[there].float()])
                token_ids[there], doubt = draw(logits[there], numbers, some)
                known[there] = torch.maximum(known[there], doubt)


def _if(condition: torch.Tensor, known: int) -> torch.Tensor:
    """`known` where it holds, int64. `where` with two numbers would bring them from the host."""
    return condition.long() * known


def _places(pairs: list[tuple[int, int]], vocabulary: int) -> _Ids:
    """Rows and columns [2, m]; a token that the model does not have is behind those it has."""
    places = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    return np.minimum(places, [[np.iinfo(np.int64).max], [vocabulary]])


class _Numbers(NamedTuple):
    """What r rows are drawn by, [r, 1] each, float64 but for the last: see `sampling.Draws`."""

    temperature: torch.Tensor
    top_p: torch.Tensor
    top_k: torch.Tensor
    min_p: torch.Tensor
    uniform: torch.Tensor
    largest: torch.Tensor
    """float32."""


def _packed(draws: Draws) -> _Ids:
    """[5, r] of float64, as int64."""
    numbers = np.stack(
        [draws.temperature, draws.top_p, draws.top_k, draws.min_p, draws.uniform]
    ).astype(np.float64, copy=False)
    return numbers.view(np.int64)


def _weights(logits: torch.Tensor, numbers: _Numbers) -> torch.Tensor:
    """exp((x - largest) / temperature), float32 [r, vocabulary], of the host's arguments."""
    weights = logits.float() - numbers.largest
    return weights.div_(numbers.temperature.float()).exp_()


def _draw_from_all(
    logits: torch.Tensor, numbers: _Numbers, draws: Draws
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of each row of all that min-p leaves, as `sampling` does: first one of the columns
    in which every `m`-th token stands, then one in it. And what is known of it, int64 [r] both."""
    num_rows, vocabulary = logits.shape
    weights = _weights(logits, numbers)
    is_clear = torch.ones((num_rows, 1), dtype=torch.bool, device=logits.device)
    if draws.min_p.any():
        least = numbers.min_p.float()
        near = ((weights - least).abs_() <= MIN_P_MARGIN * least) & (least > 0)
        is_clear = ~near.any(1, keepdim=True)
        weights *= weights >= least
    m = -(-vocabulary // BLOCK)
    if vocabulary % BLOCK:
        weights = torch.nn.functional.pad(weights, (0, m * BLOCK - vocabulary))
    columns = weights.view(num_rows, BLOCK, m)
    sums = columns.sum(1, dtype=torch.float64)
    ends = sums.cumsum(1)
    whole = ends[:, -1:]
    target = numbers.uniform * whole
    column = (ends <= target).sum(1, keepdim=True).clamp_(max=m - 1)
    before = (ends - sums).gather(1, column)
    inside = columns.gather(2, column[:, None].expand(-1, BLOCK, -1))[:, :, 0].double()
    upper = before + inside.cumsum(1)
    place = (upper <= target).sum(1, keepdim=True).clamp_(max=BLOCK - 1)
    end = upper.gather(1, place)
    start = end - inside.gather(1, place)
    is_clear &= torch.minimum(target - start, end - target) > MARGIN * whole
    # What stands behind the vocabulary weighs nothing, and may be named where nothing is clear.
    found = (place * m + column).clamp_(max=vocabulary - 1)
    return found[:, 0], _if(~is_clear[:, 0], _UNCERTAIN)


def _draw_by_rank(
    logits: torch.Tensor, numbers: _Numbers, draws: Draws
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of each row after top-k, top-p and min-p, of its largest logits; and what is known
    of it, int64 [r] both."""
    width = min(CANDIDATES, logits.shape[1])
    values, ids = logits.topk(width, dim=1)
    # Of equal ones the first one first, which `topk` does not promise.
    ids, order = ids.sort(1)
    values, order = (values.gather(1, order).float() + 0.0).sort(
        dim=1, descending=True, stable=True
    )
    return _draw_of_sorted(logits, values, ids.gather(1, order), numbers, draws)


def _draw_by_rank_of_all(
    logits: torch.Tensor, numbers: _Numbers, draws: Draws
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same with all logits sorted."""
    values, ids = (logits.float() + 0.0).sort(dim=1, descending=True, stable=True)
    return _draw_of_sorted(logits, values, ids, numbers, draws)


def _draw_of_sorted(
    logits: torch.Tensor,
    values: torch.Tensor,
    ids: torch.Tensor,
    numbers: _Numbers,
    draws: Draws,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `sampling.draw_value` does, with the largest logits [r, w] of each row and their tokens.

    All is done three times: as it is, and as if every sum that is compared were off by its margin
    the one way or the other. What the filters keep is always the first so many, and the token
    drawn moves one way only, so where the two agree it is the one.
    """
    vocabulary, width = logits.shape[1], values.shape[1]
    weights = ((values - numbers.largest).double() / numbers.temperature).exp_()
    has_top_k = numbers.top_k < vocabulary
    kth = values.gather(1, numbers.top_k.long().clamp(max=width) - 1)
    keep = (values >= kth) | ~has_top_k
    kept = weights * keep
    ends = kept.cumsum(1)
    mass = ends[:, -1:]
    margin = FINE_MARGIN
    if ((draws.top_k == vocabulary) & (draws.top_p < 1)).any():
        total = _weights(logits, numbers).sum(1, keepdim=True, dtype=torch.float64)
        mass = torch.where(has_top_k, mass, total)
        margin = MARGIN
    # For less, as it is, for more.
    off = torch.arange(-1, 2, dtype=torch.float64, device=logits.device)[:, None, None]
    keep = keep & ((ends - kept < numbers.top_p * mass * (1 + off * margin)) | (numbers.top_p == 1))
    keep &= weights >= numbers.min_p * (1 - off * FINE_MARGIN)
    keep[:, :, 0] = True
    ends = (weights * keep).cumsum(2)
    whole = ends[:, :, -1:]
    target = numbers.uniform * whole * (1 + off * FINE_MARGIN)
    target = torch.minimum(target, torch.nextafter(whole, torch.zeros_like(whole)))
    less, place, more = (ends <= target).sum(2, keepdim=True).clamp_(max=width - 1)
    doubt = _if(less != more, _UNCERTAIN)
    if width < vocabulary:
        # Of those that equal the last there may be more, in front of it too.
        last = values[:, -1:]
        is_wide = keep[2, :, -1:] | (has_top_k & (kth <= last)) | (values.gather(1, more) <= last)
        doubt = doubt.masked_fill(is_wide, _WIDE)
    return ids.gather(1, place)[:, 0], doubt[:, 0]
