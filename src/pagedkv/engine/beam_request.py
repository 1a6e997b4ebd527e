"""A prompt whose answer is searched for with beams, on its way through the engine.

Beams choose their next tokens together, by what the model says of all of them. So what it says of
one is kept until the others are computed, however many steps apart that is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from pagedkv.engine.beam_search import BeamSearch, BeamSearchParams, BeamSequence, BeamStep
from pagedkv.engine.detokenizer import Detokenizer
from pagedkv.engine.outputs import Beam, BeamGeneration


class BeamRequest:
    """`sequences` are the numbers of its beams in the scheduler, in the order of the search."""

    def __init__(
        self,
        prompt: str | None,
        prompt_ids: Sequence[int],
        params: BeamSearchParams,
        *,
        max_new_tokens: int,
        end_token_ids: frozenset[int],
        sequence: int,
        detokenizer: Callable[[], Detokenizer],
    ) -> None:
        self.prompt = prompt
        self.prompt_ids = tuple(prompt_ids)
        self.params = replace(params, max_tokens=max_new_tokens)
        self.sequences = [sequence]
        self._detokenizer = detokenizer
        self.num_cached_tokens: int | None = None
        """Tokens found in the cache when it was first admitted; None before."""
        self.admitted_s: float | None = None
        """When that was, by the engine's clock."""
        self.num_preemptions = 0
        """How often one of its beams gave way."""
        self.is_finished = False
        self.failure: BaseException | None = None
        """What a step failed of in which it had a part."""
        self._search = BeamSearch(self.params, eos_token_ids=end_token_ids)
        self._known: dict[int, NDArray[np.float32]] = {}  # by sequence
        self._is_cancelled = False

    @property
    def num_tokens(self) -> int:
        """Tokens of each beam, with those of the prompt."""
        return len(self.prompt_ids) + self._search.num_tokens

    @property
    def is_known(self) -> bool:
        """Whether it is known of every beam what the model says of it."""
        return len(self._known) == len(self.sequences)

    def note(self, sequence: int, logprobs: NDArray[np.float32]) -> None:
        """What the model says of one beam: the log probability of each token, [vocabulary]."""
        self._known[sequence] = logprobs

    def advance(self) -> BeamStep | None:
        """How the beams go on, once all is known; None when the search is over."""
        step = self._search.advance(np.stack([self._known[s] for s in self.sequences]))
        self._known.clear()
        return step

    def end(self) -> None:
        """The search is over."""
        self.is_finished = True

    def cancel(self) -> None:
        """Nobody wants to know any more, or a step has failed."""
        self.is_finished = self._is_cancelled = True

    def generation(self) -> BeamGeneration:
        """What was found, best first; nothing if it was cancelled."""
        found = [] if self._is_cancelled else self._search.best()
        return BeamGeneration(
            prompt=self.prompt,
            prompt_token_ids=self.prompt_ids,
            beams=tuple(self._beam(sequence) for sequence in found),
            num_cached_tokens=self.num_cached_tokens or 0,
        )

    def _beam(self, found: BeamSequence) -> Beam:
        stream = self._detokenizer()
        # The token that ended it is no part of the text.
        told = found.token_ids[:-1] if found.finished else found.token_ids
        return Beam(
            text="".join(stream.append(token_id) for token_id in told) + stream.flush(),
            token_ids=found.token_ids,
            logprob=found.logprob,
            score=found.score,
            finish_reason="stop" if found.finished else "length",
        )
