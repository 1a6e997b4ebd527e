"""`SamplingParams`: how one request's tokens are chosen, and when it ends.

Names, meanings and defaults are those that OpenAI's API and vLLM share, so that a client of
either needs no translation. `docs/sampling.md` is the table for users.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pagedkv.engine.structured_output import StructuredOutput
from pagedkv.errors import InvalidInput

MAX_LOGPROBS = 20
"""Alternatives reported beside a token, at most: the limit of OpenAI's API."""

MAX_REPETITION_PENALTY = 1_000
"""Logits times or over more than this could leave the range of a float."""

MAX_SEED = 2**64 - 1
MAX_TOKEN_ID = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request's tokens are chosen, and when it ends.

    >>> SamplingParams(temperature=0, max_tokens=64, stop="\\n\\n").stop_strings
    ('\\n\\n',)

    Raises `InvalidInput`, one line that names the option, for values out of range or in conflict.
    """

    n: int = 1
    """Samples of the prompt, which share its blocks. Each draws from a stream of its own."""
    max_tokens: int | None = 16
    """Tokens to generate at most; None: until the model's length is reached."""
    min_tokens: int = 0
    """Before this many tokens, nothing ends a sample but `max_tokens` and the model's length."""
    temperature: float = 1.0
    """Divides the logits; 0 takes the likeliest token each time (greedy)."""
    top_p: float = 1.0
    """Only the likeliest tokens that together hold this share of the probability; 1: all."""
    top_k: int = 0
    """Only this many likeliest tokens, and those that tie with the last; 0 or -1: all."""
    min_p: float = 0.0
    """Only tokens at least this share as likely as the likeliest; 0: all."""
    presence_penalty: float = 0.0
    """Taken off the logit of each token that the output has already, -2 to 2."""
    frequency_penalty: float = 0.0
    """Taken off a token's logit once for each time the output has it already, -2 to 2."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in prompt or output; 1: none."""
    logit_bias: Mapping[int, float] | None = None
    """Added to the logits of these token ids, each -100 to 100."""
    seed: int | None = None
    """The same seed and prompt give the same samples, whatever runs beside them."""
    stop: str | Sequence[str] = ()
    """Text that ends a sample; it is cut off the output."""
    stop_token_ids: Sequence[int] = ()
    """Tokens that end a sample; their text is not part of the output."""
    include_stop_str_in_output: bool = False
    """Keep the stop string, or the text of the stop token, at the end of the output."""
    ignore_eos: bool = False
    """Go on after the model's own end-of-sequence tokens."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text. `token_ids` always has them."""
    logprobs: int | None = None
    """Log probability of each token, and of this many likeliest, 0 to 20; None: not at all."""
    prompt_logprobs: int | None = None
    """The same of the prompt's tokens, which are then computed even where they are cached."""
    structured: StructuredOutput | None = None
    """What the text must be; needs the extra `structured`."""

    def __post_init__(self) -> None:
        for name in ("n", "min_tokens", "top_k"):
            self._set(name, _integer(name, getattr(self, name)))
        for name in ("max_tokens", "seed", "logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                self._set(name, _integer(name, getattr(self, name)))
        for name in (
            "temperature",
            "top_p",
            "min_p",
            "presence_penalty",
            "frequency_penalty",
            "repetition_penalty",
        ):
            self._set(name, _number(name, getattr(self, name)))
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidInput(f"{name} is {getattr(self, name)!r}: give True or False")
        if not isinstance(self.structured, StructuredOutput | None):
            raise InvalidInput(
                f"structured is {type(self.structured).__name__}: give a StructuredOutput"
            )
        self._set("stop", _stop_strings(self.stop))
        self._set("stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        if self.logit_bias is not None:
            self._set("logit_bias", _biases(self.logit_bias))
        self._check_ranges()
        self._check_conflicts()

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_ranges(self) -> None:
        _at_least("n", self.n, 1)
        _at_least("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None and self.max_tokens < 1:
            raise InvalidInput(
                f"max_tokens is {self.max_tokens}: give at least 1, or None for no limit"
            )
        _at_least("temperature", self.temperature, 0)
        if not 0 < self.top_p <= 1:
            raise InvalidInput(f"top_p is {self.top_p}: give above 0 to 1; 1 keeps all tokens")
        if self.top_k < -1:
            raise InvalidInput(f"top_k is {self.top_k}: give at least 1, or 0 to keep all tokens")
        _between("min_p", self.min_p, 0, 1)
        _between("presence_penalty", self.presence_penalty, -2, 2)
        _between("frequency_penalty", self.frequency_penalty, -2, 2)
        if not 1 / MAX_REPETITION_PENALTY <= self.repetition_penalty <= MAX_REPETITION_PENALTY:
            raise InvalidInput(
                f"repetition_penalty is {self.repetition_penalty}: give "
                f"{1 / MAX_REPETITION_PENALTY} to {MAX_REPETITION_PENALTY}; 1 is no penalty"
            )
        if self.seed is not None:
            _between("seed", self.seed, 0, MAX_SEED)
        if self.logprobs is not None:
            _between("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.prompt_logprobs is not None:
            _between("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)

    def _check_conflicts(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidInput(
                f"min_tokens is {self.min_tokens} and max_tokens {self.max_tokens}: "
                "give min_tokens at most max_tokens"
            )
        if self.is_greedy and self.n > 1:
            raise InvalidInput(
                f"n is {self.n} and temperature 0: greedy samples of one prompt are all the same, "
                "give n=1 or a temperature above 0"
            )

    @property
    def is_greedy(self) -> bool:
        """Whether each token is the likeliest one."""
        return self.temperature == 0

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop`, always as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def has_penalties(self) -> bool:
        """Whether the tokens so far change the logits."""
        return (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
        )


def _integer(name: str, value: Any) -> int:
    if not isinstance(value, bool):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise InvalidInput(f"{name} is {value!r}: give a whole number")


def _number(name: str, value: Any) -> float:
    if not isinstance(value, (bool, str, bytes)):
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if math.isfinite(number):
            return number
    raise InvalidInput(f"{name} is {value!r}: give a finite number")


def _at_least(name: str, value: float, least: int) -> None:
    if value < least:
        raise InvalidInput(f"{name} is {value}: give at least {least}")


def _between(name: str, value: float, least: int, most: int) -> None:
    if not least <= value <= most:
        raise InvalidInput(f"{name} is {value}: give {least} to {most}")


def _stop_strings(stop: Any) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else stop
    if not isinstance(strings, Sequence) or not all(isinstance(s, str) for s in strings):
        raise InvalidInput(f"stop is {stop!r}: give a string or a list of strings")
    if "" in strings:
        raise InvalidInput("stop has an empty string, which is everywhere: leave it out")
    return tuple(strings)


def _token_ids(name: str, ids: Any) -> tuple[int, ...]:
    try:
        found = tuple(_token_id(name, i) for i in ids)
    except TypeError:
        raise InvalidInput(f"{name} is {ids!r}: give a list of token ids") from None
    return found


def _token_id(name: str, value: Any) -> int:
    token_id = _integer(name, value)
    if not 0 <= token_id <= MAX_TOKEN_ID:
        raise InvalidInput(f"{name} has {token_id}: token ids are 0 or more")
    return token_id


def _biases(biases: Any) -> dict[int, float]:
    if not isinstance(biases, Mapping):
        raise InvalidInput(f"logit_bias is {biases!r}: give biases by token id")
    found = {}
    for key, value in biases.items():
        # JSON has no other keys than strings.
        digits = isinstance(key, str) and key.isascii() and key.isdigit()
        token_id = _token_id("logit_bias", int(key) if digits else key)
        found[token_id] = _number(f"logit_bias of token {token_id}", value)
        _between(f"logit_bias of token {token_id}", found[token_id], -100, 100)
    return found
