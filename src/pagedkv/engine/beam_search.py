"""Beam search as bookkeeping: which beams go on, from which parents, with which tokens.

It is `transformers`' beam search without its model, its cache and its padded tensors: given the
log probabilities of a step it says which beams to fork. Candidates, scores, the length penalty
and the rules for stopping early are the same, so the sequences found are the same.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from pagedkv.engine.largest import largest
from pagedkv.errors import InvalidInput


@dataclass(frozen=True, kw_only=True)
class BeamSearchParams:
    """How wide to search, and when to be content.

    Raises `InvalidInput`, one line that names the option, for values out of range.
    """

    num_beams: int = 4
    """Sequences that go on at once, and finished ones that are kept."""
    num_return_sequences: int = 1
    """Finished sequences to return, best first."""
    max_tokens: int = 16
    """Tokens to generate at most."""
    length_penalty: float = 1.0
    """A sequence's score is its log probability over its tokens to this power: above 0 favours
    long sequences, below 0 short ones."""
    early_stopping: bool | Literal["never"] = False
    """True: stop at `num_beams` finished sequences. False: when none of the running ones would
    beat them if it ended now. "never": when none can, however long it grows."""
    ignore_eos: bool = False
    """Go on after the model's own end-of-sequence tokens."""

    def __post_init__(self) -> None:
        for name in ("num_beams", "num_return_sequences", "max_tokens"):
            value = getattr(self, name)
            try:
                least_reached = not isinstance(value, bool) and operator.index(value) >= 1
            except TypeError:
                least_reached = False
            if not least_reached:
                raise InvalidInput(f"{name} is {value!r}: give a whole number, at least 1")
        if self.num_return_sequences > self.num_beams:
            raise InvalidInput(
                f"num_return_sequences is {self.num_return_sequences} and num_beams "
                f"{self.num_beams}: only num_beams sequences are kept, give at most as many"
            )
        if isinstance(self.length_penalty, bool) or not np.isfinite(self.length_penalty):
            raise InvalidInput(f"length_penalty is {self.length_penalty}: give a finite number")
        if self.early_stopping not in (True, False, "never"):
            raise InvalidInput(
                f"early_stopping is {self.early_stopping!r}: give True, False or 'never'"
            )


@dataclass(frozen=True)
class BeamStep:
    """What goes on after a step: `num_beams` beams or, in tiny vocabularies, fewer; best first."""

    parents: NDArray[np.int64]
    """[beams]: which beam of the step before each goes on from. One that is not named ends here;
    one that is named twice is forked."""
    token_ids: NDArray[np.int64]
    """[beams]: the token that each goes on with."""


@dataclass(frozen=True)
class BeamSequence:
    """A sequence that was found."""

    token_ids: tuple[int, ...]
    """The output, with its end-of-sequence token if it has one."""
    logprob: float
    """Log probability of the output."""
    score: float
    """`logprob` with the length penalty: what sequences are compared by."""
    finished: bool
    """Whether it ended with an end-of-sequence token; if not, `max_tokens` cut it."""


@dataclass(frozen=True)
class _Ended:
    score: float
    logprob: float
    step: int
    parent: int
    token_id: int
    finished: bool


class BeamSearch:
    """The state of one beam search.

    >>> search = BeamSearch(BeamSearchParams(num_beams=2, max_tokens=2), eos_token_ids=[0])
    >>> step = search.advance(np.log(np.array([[0.1, 0.6, 0.3]], dtype=np.float32)))
    >>> step.parents.tolist(), step.token_ids.tolist()
    ([0, 0], [1, 2])
    >>> logprobs = np.log(np.array([[0.2, 0.4, 0.4], [0.9, 0.05, 0.05]], dtype=np.float32))
    >>> search.advance(logprobs) is None
    True
    >>> search.best(1)[0].token_ids
    (2, 0)
    """

    def __init__(self, params: BeamSearchParams, *, eos_token_ids: Collection[int] = ()) -> None:
        self.params = params
        eos = () if params.ignore_eos else sorted(set(eos_token_ids))
        self._eos = np.array(eos, dtype=np.int64)
        self._running = np.zeros(1, dtype=np.float32)  # log probability of each beam
        self._ended: list[_Ended] = []  # best first
        self._parents: list[NDArray[np.int64]] = []  # step by step, beam by beam
        self._token_ids: list[NDArray[np.int64]] = []
        self.done = False

    @property
    def num_tokens(self) -> int:
        """Tokens of each running beam."""
        return len(self._token_ids)

    def advance(self, logprobs: NDArray[np.float32]) -> BeamStep | None:
        """Choose the beams that go on, by the log probabilities [beams, vocabulary] of each.

        A row for each beam of the step before, in its order; a single one at first, the prompt's.
        None when the search is over.
        """
        if self.done:
            raise InvalidInput("this beam search is over: begin a new one")
        logprobs = np.asarray(logprobs, dtype=np.float32)
        if len(logprobs) != len(self._running):
            raise InvalidInput(
                f"log probabilities of {len(logprobs)} beams: there are {len(self._running)}"
            )
        params, num_beams = self.params, self.params.num_beams
        vocabulary = logprobs.shape[1]
        # So many that num_beams go on, though every beam ends in every way.
        num_candidates = max(2, 1 + len(self._eos)) * num_beams
        sums, places = largest((logprobs + self._running[:, None]).reshape(1, -1), num_candidates)
        candidates, parents, token_ids = sums[0], places[0] // vocabulary, places[0] % vocabulary
        length = self.num_tokens + 1
        at_end = np.isin(token_ids, self._eos)
        ends = at_end | (length >= params.max_tokens)

        for place in np.flatnonzero(ends[:num_beams]):
            logprob = float(candidates[place])
            self._keep(
                _Ended(
                    score=_score(logprob, length, params.length_penalty),
                    logprob=logprob,
                    step=length - 1,
                    parent=int(parents[place]),
                    token_id=int(token_ids[place]),
                    finished=bool(at_end[place]),
                )
            )
        go_on = np.flatnonzero(~ends)[:num_beams]
        self._running = candidates[go_on]
        self._parents.append(parents[go_on])
        self._token_ids.append(token_ids[go_on])
        enough = params.early_stopping is True and self._is_full
        self.done = enough or len(go_on) == 0 or not self._can_improve(length)
        return None if self.done else BeamStep(parents[go_on], token_ids[go_on])

    def best(self, count: int | None = None) -> list[BeamSequence]:
        """The best sequences found, best first: `num_return_sequences` unless told otherwise."""
        count = self.params.num_return_sequences if count is None else count
        return [
            BeamSequence(
                token_ids=(*self._tokens_before(ended.step, ended.parent), ended.token_id),
                logprob=ended.logprob,
                score=ended.score,
                finished=ended.finished,
            )
            for ended in self._ended[:count]
        ]

    @property
    def _is_full(self) -> bool:
        return len(self._ended) == self.params.num_beams

    def _keep(self, ended: _Ended) -> None:
        self._ended.append(ended)
        self._ended.sort(key=lambda e: -e.score)  # stable: of equal ones, the older is better
        del self._ended[self.params.num_beams :]

    def _can_improve(self, length: int) -> bool:
        """Whether the best running beam might still beat the worst that is kept."""
        if not self._is_full:
            return True
        params = self.params
        longest = params.early_stopping == "never" and params.length_penalty > 0
        hoped = _score(
            float(self._running[0]),
            params.max_tokens if longest else length,
            params.length_penalty,
        )
        return hoped > self._ended[-1].score

    def _tokens_before(self, step: int, beam: int) -> list[int]:
        found = []
        for parents, token_ids in zip(self._parents[:step][::-1], self._token_ids[:step][::-1]):
            found.append(int(token_ids[beam]))
            beam = int(parents[beam])
        return found[::-1]


def _score(logprob: float, length: int, length_penalty: float) -> float:
    return float(np.float32(logprob) / np.float32(length**length_penalty))
