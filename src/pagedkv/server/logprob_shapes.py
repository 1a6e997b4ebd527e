"""Log probabilities in the shapes of OpenAI's two APIs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pagedkv.engine.detokenizer import TokenTexts
from pagedkv.engine.logprobs import TokenLogprob

_LEAST = -9999.0
"""What OpenAI's API says instead of minus infinity, which JSON has no word for."""


class TokenNames:
    """What a single token is called."""

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts

    def bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to a text."""
        return self._texts.token_bytes(token_id)

    def text(self, token_id: int) -> str:
        """The same as text; a part of a character has a replacement character in its place."""
        return self.bytes(token_id).decode("utf-8", "replace")


def chat_logprobs(logprobs: Sequence[TokenLogprob], names: TokenNames) -> dict[str, Any]:
    """As `logprobs` of a chat's choice."""
    return {
        "content": [
            {
                **_chat_token(found.token_id, found.logprob, names),
                "top_logprobs": [_chat_token(i, logprob, names) for i, logprob in found.top],
            }
            for found in logprobs
        ],
        "refusal": None,
    }


def completion_logprobs(
    logprobs: Sequence[TokenLogprob | None],
    token_ids: Sequence[int],
    names: TokenNames,
    *,
    offset: int,
) -> dict[str, Any]:
    """As `logprobs` of a completion's choice. `offset`: characters before its first token.

    None where nothing foretells a token.
    """
    tokens = [names.text(token_id) for token_id in token_ids]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    return {
        "text_offset": offsets,
        "token_logprobs": [None if found is None else _number(found.logprob) for found in logprobs],
        "tokens": tokens,
        "top_logprobs": [None if found is None else _likeliest(found, names) for found in logprobs],
    }


def _likeliest(found: TokenLogprob, names: TokenNames) -> dict[str, float]:
    """The likeliest tokens, and the one that was chosen; of two with one name the likelier."""
    likeliest: dict[str, float] = {}
    for token_id, logprob in (*found.top, (found.token_id, found.logprob)):
        likeliest.setdefault(names.text(token_id), _number(logprob))
    return likeliest


def _chat_token(token_id: int, logprob: float, names: TokenNames) -> dict[str, Any]:
    return {
        "token": names.text(token_id),
        "logprob": _number(logprob),
        "bytes": list(names.bytes(token_id)),
    }


def _number(logprob: float) -> float:
    return max(logprob, _LEAST)
