"""What a request gets: chunks while it runs, and the whole at the end; beams all at the end."""

from __future__ import annotations

from dataclasses import dataclass

from pagedkv.engine.logprobs import TokenLogprob
from pagedkv.engine.stopping import FinishReason


@dataclass(frozen=True)
class Chunk:
    """What one step added to one sample of a request."""

    sample: int
    """Which of the request's `n` samples, from 0."""
    text: str
    """What is certain of the text so far and was not told before; may be empty."""
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None
    finish_reason: FinishReason | None
    """Why the sample ended, with its last chunk, else None; see `stopping.Finish`."""
    stop_reason: str | int | None = None
    """The stop string or the token id that ended it, with its last chunk, if one did."""


@dataclass(frozen=True)
class Completion:
    """One whole sample."""

    sample: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None
    """The stop string or the token id that ended it, if one did."""
    logprobs: tuple[TokenLogprob, ...] | None


@dataclass(frozen=True)
class Generation:
    """A prompt and its samples."""

    prompt: str | None
    """None where the prompt was given as token ids."""
    prompt_token_ids: tuple[int, ...]
    completions: tuple[Completion, ...]
    num_cached_tokens: int
    """Tokens of the prompt that were found in the cache when it was first admitted."""
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None
    """One for each prompt token, None for the first, which nothing foretells."""

    @property
    def text(self) -> str:
        """The text of the first sample."""
        return self.completions[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens of the first sample."""
        return self.completions[0].token_ids


@dataclass(frozen=True)
class Beam:
    """One sequence that a beam search has found."""

    text: str
    token_ids: tuple[int, ...]
    """With the end token, if it ended with one; that is no part of the text."""
    logprob: float
    """Natural logarithm of the probability of all of its tokens."""
    score: float
    """`logprob` with the length penalty: what beams are compared by."""
    finish_reason: FinishReason
    """"stop": it ended with an end token. "length": it is as long as was allowed."""


@dataclass(frozen=True)
class BeamGeneration:
    """A prompt and the best sequences that were found."""

    prompt: str | None
    """None where the prompt was given as token ids."""
    prompt_token_ids: tuple[int, ...]
    beams: tuple[Beam, ...]
    """Best first. None where it was cancelled, as with a step that failed for somebody else."""
    num_cached_tokens: int
    """Tokens of the prompt that were found in the cache when it was first admitted."""
