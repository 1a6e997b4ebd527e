"""When a sequence ends, and what of its text may be shown before that is known."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from pagedkv.engine.detokenizer import Detokenizer
from pagedkv.engine.sampling_params import SamplingParams

FinishReason: TypeAlias = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class Finish:
    """Why a sequence ended."""

    reason: FinishReason
    """"stop": the model's end token, one of the request's stop tokens or strings, or a structured
    output that is complete. "length":
    `max_tokens` or the model's length. "abort": somebody cancelled it."""
    stop: int | str | None = None
    """The stop token or the stop string of the request that ended it; None for anything else."""


@dataclass(frozen=True)
class Progress:
    """What one token brought."""

    text: str
    """Text that can be shown now: nothing that comes later takes it back."""
    finish: Finish | None


def output_limit(max_tokens: int | None, *, prompt_tokens: int, max_model_len: int) -> int:
    """Tokens that a sequence may generate: at most `max_tokens`, and what the model can hold.

    0 or less if the prompt leaves the model no room for a single one.
    """
    room = max_model_len - prompt_tokens
    return room if max_tokens is None else min(room, max_tokens)


class OutputText:
    """The output of one sequence: tokens in, text and the reason to end out.

    `limit`: tokens that it may generate, see `output_limit`. `eos_token_ids`: the model's.
    A stop string ends the output where its last character comes, wherever the text is cut into
    tokens; the beginning of one is held back until it is known not to be one. Of several that
    come with the same character the longest counts.
    """

    def __init__(
        self,
        params: SamplingParams,
        detokenizer: Detokenizer,
        *,
        eos_token_ids: Collection[int] = (),
        limit: int,
    ) -> None:
        self._detokenizer = detokenizer
        self._eos = frozenset() if params.ignore_eos else frozenset(eos_token_ids)
        self._stop_ids = frozenset(params.stop_token_ids)
        self._keeps_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._limit = limit
        self._stops = _StopStrings(params.stop_strings) if params.stop else None
        self._pieces: list[str] = []
        self.num_tokens = 0
        self.finish: Finish | None = None
        """Why it ended; None while it has not."""

    @property
    def text(self) -> str:
        """All text given out so far: what the pieces make together."""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    def append(self, token_id: int, *, is_last: bool = False) -> Progress:
        """Note the next token, and say what can be shown and whether the sequence ends with it.

        `is_last`: it does, since nothing can follow.
        """
        self.num_tokens += 1
        may_stop = self.num_tokens > self._min_tokens
        finish = None
        if may_stop and token_id in self._stop_ids:
            finish = Finish("stop", token_id)
        elif may_stop and token_id in self._eos:
            finish = Finish("stop")
        piece = ""
        if finish is None or self._keeps_stop:
            piece = self._detokenizer.append(token_id)
        if finish is None and is_last:
            finish = Finish("stop")
        elif finish is None and self.num_tokens >= self._limit:
            finish = Finish("length")
        if finish is not None:
            piece += self._detokenizer.flush()
        return self._give(piece, may_stop=may_stop, finish=finish)

    def abort(self) -> Progress:
        """End the sequence now, with the text of the tokens that it has."""
        may_stop = self.num_tokens > self._min_tokens
        return self._give(self._detokenizer.flush(), may_stop=may_stop, finish=Finish("abort"))

    def _give(self, piece: str, *, may_stop: bool, finish: Finish | None) -> Progress:
        if self._stops is not None:
            piece, stop = self._stops.pass_on(piece, may_stop=may_stop)
            if stop is not None:
                finish = Finish("stop", stop)
                piece += stop if self._keeps_stop else ""
            elif finish is not None:
                piece += self._stops.held
        if piece:
            self._pieces.append(piece)
        self.finish = finish
        return Progress(piece, finish)


class _StopStrings:
    """Text passes through, except what may be the beginning of a stop string.

    For each string, how much of its beginning the text ends with, kept up to date by every
    character (Knuth, Morris and Pratt, "Fast pattern matching in strings", 1977).
    """

    def __init__(self, strings: Sequence[str]) -> None:
        # Longest first, so that it counts where several are complete.
        self._strings = sorted(strings, key=len, reverse=True)
        self._fallbacks = [_fallbacks(string) for string in self._strings]
        self._firsts = {string[0] for string in self._strings}
        self._matched = [0] * len(strings)
        self.held = ""
        """Text kept back: the longest beginning of a stop string that the text ends with."""

    def pass_on(self, piece: str, *, may_stop: bool) -> tuple[str, str | None]:
        """The text to show, and the stop string that is complete, which is not part of it."""
        if not self.held and not any(first in piece for first in self._firsts):
            return piece, None  # most text is like this, and not worth a look at each character
        text = self.held + piece
        for end, character in enumerate(piece, start=len(self.held) + 1):
            complete = self._advance(character)
            if complete is not None and may_stop:
                self.held = ""
                return text[: end - len(complete)], complete
        shown = len(text) - max(self._matched)
        self.held = text[shown:]
        return text[:shown], None

    def _advance(self, character: str) -> str | None:
        complete = None
        for place, (string, fallbacks) in enumerate(zip(self._strings, self._fallbacks)):
            matched = self._matched[place]
            while matched and string[matched] != character:
                matched = fallbacks[matched - 1]
            matched += string[matched] == character
            if matched == len(string):
                complete = string if complete is None else complete
                matched = fallbacks[matched - 1]
            self._matched[place] = matched
        return complete


def _fallbacks(string: str) -> list[int]:
    """For each beginning of a string, the length of its longest proper end that is one too."""
    found = [0]
    for character in string[1:]:
        matched = found[-1]
        while matched and string[matched] != character:
            matched = found[matched - 1]
        found.append(matched + (string[matched] == character))
    return found
