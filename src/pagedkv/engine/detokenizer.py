"""Text from token ids as they come, so that the pieces put together are the text of them all.

A token is not a piece of text. Of byte-level vocabularies it is a few bytes, and a character may
be spread over several tokens; other decoders strip the first space of a text, or join byte tokens
to characters only when the last one is there. A stream here gives out text as soon as no later
token can change it, and what is left over at the end:

    "".join(stream.append(i) for i in ids) + stream.flush() == tokenizer.decode(ids)

Each token costs the same, however long the text is. "The text of them all" is what the tokenizer
decodes without `clean_up_tokenization_spaces`, which takes spaces away that the model wrote.
"""

from __future__ import annotations

import codecs
import functools
import json
import re
from collections.abc import Callable, Sequence
from typing import Any, Protocol

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_CONTEXT = 6
"""Tokens of the prompt before the output, so that its first space is not taken for the text's."""


class Detokenizer(Protocol):
    """The text of one sequence's tokens, piece by piece."""

    def append(self, token_id: int) -> str:
        """The text that this token settles; often its own, sometimes none, sometimes more."""

    def flush(self) -> str:
        """The text not given out yet. No token may come after it."""


class TokenTexts:
    """What a tokenizer makes of token ids: one for each tokenizer, a stream for each sequence.

    `tokenizer`: of `transformers`, or a `tokenizers.Tokenizer`. What is found out about a token
    is kept, so that it is looked up once.
    """

    def __init__(self, tokenizer: Any) -> None:
        rust = tokenizer if hasattr(tokenizer, "decoder") else None
        rust = getattr(tokenizer, "backend_tokenizer", None) or rust
        if rust is None or not hasattr(rust, "id_to_token"):
            self._decode: Callable[[list[int]], str] = functools.partial(
                tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
            self._token = tokenizer.convert_ids_to_tokens
            self._special = frozenset(tokenizer.all_special_ids)
            self._decoders = ["?"]
        else:
            self._decode = functools.partial(rust.decode, skip_special_tokens=False)
            self._token = rust.id_to_token
            added = rust.get_added_tokens_decoder()
            self._special = frozenset(i for i, token in added.items() if token.special)
            self._decoders = _decoders(rust.decoder)
        self._tokens: dict[int, str | None] = {}
        self._bytes: dict[int, bytes] = {}

    def stream(
        self, *, skip_special_tokens: bool = True, prompt_ids: Sequence[int] = ()
    ) -> Detokenizer:
        """A stream for the tokens of one sequence's output.

        With `prompt_ids`, the text is the one that goes on behind the prompt, which matters to
        tokenizers that strip a text's first space: " world" rather than "world" behind "Hello".
        """
        special = self._special if skip_special_tokens else frozenset()
        if self._decoders == ["ByteLevel"]:
            return _ByteStream(self._bytes_of, special)

        def skipped(token_id: int) -> bool:
            return token_id in special or self._is_absent(token_id)

        context: list[int] = []
        for token_id in reversed(prompt_ids):
            # Bytes at its end are left out: half a character there would join the output's first
            # bytes, or have them replaced although they are text.
            if not skipped(token_id) and (context or not self._is_byte_token(token_id)):
                context.append(token_id)
                if len(context) == _CONTEXT:
                    break
        return _WindowStream(
            self._decode,
            skipped,
            context[::-1],
            # Whether a run of bytes is text shows at its end: one that is not is all replaced.
            holds_token=self._is_byte_token if "ByteFallback" in self._decoders else _no,
            # Anything may be inside a decoder that is not known, half characters too.
            holds_replacement=bool({"?", "ByteLevel"}.intersection(self._decoders)),
        )

    def token_bytes(self, token_id: int) -> bytes:
        """What one token adds to a text, special tokens included; it may be half a character."""
        if self._decoders == ["ByteLevel"]:
            return self._bytes_of(token_id)
        token = self._token_of(token_id) or ""
        if _BYTE_TOKEN.fullmatch(token):
            return bytes([int(token[1:-1], 16)])
        # Behind another token, so that its first space is not taken for the text's.
        alone = self._decode([token_id])
        twice = self._decode([token_id, token_id])
        return (twice[len(alone) :] if twice.startswith(alone) else alone).encode()

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Tokens that are no text."""
        return self._special

    def _token_of(self, token_id: int) -> str | None:
        try:
            return self._tokens[token_id]
        except KeyError:
            return self._tokens.setdefault(token_id, self._token(token_id))

    def _bytes_of(self, token_id: int) -> bytes:
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = _bytes_of_token(self._token_of(token_id) or "")
        return found

    def _is_absent(self, token_id: int) -> bool:
        """Whether there is no such token: models have more rows than their tokenizers tokens."""
        return self._token_of(token_id) is None

    def _is_byte_token(self, token_id: int) -> bool:
        token = self._token_of(token_id)
        return token is not None and _BYTE_TOKEN.fullmatch(token) is not None


class _ByteStream:
    """Byte-level vocabularies: every token is bytes, and their text is UTF-8.

    Python's incremental decoder replaces what is not text just as the decoder of `tokenizers`
    does: each longest beginning of a character once.
    """

    def __init__(self, bytes_of: Callable[[int], bytes], skipped: frozenset[int]) -> None:
        self._bytes_of = bytes_of
        self._skipped = skipped
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def append(self, token_id: int) -> str:
        return "" if token_id in self._skipped else self._utf8.decode(self._bytes_of(token_id))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class _WindowStream:
    """Any other tokenizer: decode the last few tokens again, with and without the new one.

    The window begins with tokens whose text is given out already: the decoder does to their first
    space what it does to the first space of any text, both times, and so it cancels out.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        skipped: Callable[[int], bool],
        context: list[int],
        *,
        holds_token: Callable[[int], bool],
        holds_replacement: bool,
    ) -> None:
        self._decode = decode
        self._skipped = skipped
        self._holds_token = holds_token
        self._holds_replacement = holds_replacement
        self._window = context
        self._num_given = len(context)  # tokens at its beginning whose text is given out
        self._given = decode(context) if context else ""

    def append(self, token_id: int) -> str:
        # What is skipped is not there at all for the decoder: it breaks no run of bytes.
        if self._skipped(token_id):
            return ""
        self._window.append(token_id)
        return "" if self._holds_token(token_id) else self._advance()

    def flush(self) -> str:
        self._holds_replacement = False
        return self._advance()

    def _advance(self) -> str:
        text = self._decode(self._window)
        if self._holds_replacement and text.endswith(_REPLACEMENT):
            text = text[: -len(_REPLACEMENT)]
            piece = text[len(self._given) :]
            self._given += piece
            return piece
        piece = text[len(self._given) :]
        if piece:
            del self._window[: self._num_given]
            self._num_given = len(self._window)
            self._given = self._decode(self._window)
        return piece


def _no(token_id: int) -> bool:
    return False


def _decoders(decoder: Any) -> list[str]:
    """The names of the decoders that a decoder of `tokenizers` is made of."""
    if decoder is None:
        return ["?"]
    described = json.loads(decoder.__getstate__())
    parts = described["decoders"] if described["type"] == "Sequence" else [described]
    return [part["type"] for part in parts]


@functools.cache
def _byte_of_character() -> dict[str, int]:
    """Byte-level vocabularies write a byte as a character that can be seen.

    Bytes that are visible in Latin-1 stand for themselves, all others for U+0100 and on.
    """
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in visible]
    return {
        **{chr(byte): byte for byte in visible},
        **{chr(0x100 + place): byte for place, byte in enumerate(others)},
    }


def _bytes_of_token(token: str) -> bytes:
    table = _byte_of_character()
    try:
        return bytes([table[character] for character in token])
    except KeyError:  # an added token, written as it is
        return token.encode()
