"""Grammars compiled for a model's tokens, and where in one an answer is.

`llguidance` (the extra `structured`) does both: it compiles what a `StructuredOutput` says, and
tells which tokens may come next. A grammar is compiled once, however many answers follow it at once
or later, and each of these has a place of its own in it (`GrammarPlace`), which is a function of
the tokens that it has said: forks and preemptions need nothing else.

Whoever asks for a grammar compiles it in its own thread, outside the interpreter's lock; the thread
that runs the steps never has to.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pagedkv.engine.detokenizer import TokenTexts
from pagedkv.engine.structured_output import StructuredOutput
from pagedkv.errors import InvalidInput

Bits: TypeAlias = NDArray[np.uint8]
"""One bit a token, the lowest of a byte first: whether it may come next."""

MAX_GRAMMARS = 32
"""Compiled grammars that are kept, those asked for last."""

MAX_LEXER_STATES = 50_000
"""What is remembered of the text inside a word of one grammar: about 2 kB each."""

_WHITESPACE = r"[ \n\r\t]{0,40}"
"""Between the parts of JSON. Without an end a model that likes lines would write nothing else."""

_NO_FORCING = '%llguidance {"no_forcing": true}\n'
"""Where only one text can follow, let the model cut it into tokens as it likes. `llguidance` would
have it say those that the tokenizer would write; to find these it looks ahead as far as the text is
certain, which has no end for `start: /a+/ /a+/`."""

_NOTHING_FOLLOWS = "no text of the model's tokens is like that"
_MAX_TOLD = 300


class GrammarFailed(InvalidInput):
    """An answer cannot go on by its grammar."""


class Grammars:
    """What compiles and keeps the grammars of one model. Any thread may ask.

    `texts` is what the model's tokens are; None without a tokenizer. `end_token_ids` end an answer
    where its grammar may end.
    """

    def __init__(
        self, texts: TokenTexts | None, *, vocab_size: int, end_token_ids: Collection[int]
    ) -> None:
        self._texts = texts
        self._vocab_size = vocab_size
        self._ends = sorted(i for i in end_token_ids if i < vocab_size)
        self._tokens: Any = None  # llguidance's tokenizer, made when somebody needs it
        self._making = threading.Lock()
        self._keeping = threading.Lock()
        self._kept: OrderedDict[StructuredOutput, Grammar] = OrderedDict()

    def has(self, structured: StructuredOutput) -> bool:
        """Whether it is compiled already."""
        return structured in self._kept

    def compiled(self, structured: StructuredOutput) -> Grammar:
        """The grammar, compiled now if it was not.

        Raises `InvalidInput`, one line, for what is no grammar, for one that allows no text, and
        where `llguidance` or a tokenizer is missing.
        """
        with self._keeping:
            if structured in self._kept:
                self._kept.move_to_end(structured)
                return self._kept[structured]
        grammar = self._compile(structured)
        with self._keeping:
            self._kept[structured] = grammar
            if len(self._kept) > MAX_GRAMMARS:
                self._kept.popitem(last=False)
        return grammar

    def _compile(self, structured: StructuredOutput) -> Grammar:
        try:
            import llguidance
        except ImportError:
            raise InvalidInput(
                "structured output needs llguidance: install pagedkv[structured]"
            ) from None
        if self._texts is None:
            raise InvalidInput("structured output needs a tokenizer, and this model has none")
        with self._making:
            if self._tokens is None:
                self._tokens = llguidance.LLTokenizer(
                    llguidance.TokenizerWrapper(
                        _Vocabulary(self._texts, self._vocab_size, self._ends)
                    ),
                    eos_token=self._ends or None,
                )
        try:
            matcher = llguidance.LLMatcher(
                self._tokens,
                _source(structured),
                limits=llguidance.LLParserLimits(
                    max_lexer_states=MAX_LEXER_STATES, verbose_errors=False
                ),
                log_level=0,
            )
        except ValueError as problem:
            raise _refused(structured, str(problem)) from None
        if matcher.is_error():
            raise _refused(structured, matcher.get_error())
        grammar = Grammar(matcher, self._vocab_size, self._ends)
        start = grammar.begin()
        if start.problem is not None:
            raise _refused(structured, start.problem)
        if start.is_complete:
            raise _refused(structured, "it allows no text but the empty one")
        return grammar


class Grammar:
    """A compiled grammar, before the first token."""

    def __init__(self, matcher: Any, vocab_size: int, end_token_ids: Sequence[int]) -> None:
        self._matcher = matcher
        self._text_bits = _text_bits(vocab_size, end_token_ids)

    def begin(self) -> GrammarPlace:
        """The place of an answer that has no token yet."""
        return GrammarPlace(self._matcher.deep_copy(), self._text_bits)


class GrammarPlace:
    """Where in its grammar an answer is. `allowed`: the tokens that may come next, ends among them
    where the text may end."""

    __slots__ = ("_matcher", "_text_bits", "allowed", "is_complete", "problem")

    def __init__(self, matcher: Any, text_bits: Bits) -> None:
        self._matcher = matcher
        self._text_bits = text_bits
        self.is_complete = False
        """Whether the text is all that it may be: nothing but an end can follow."""
        self.problem: str | None = None
        """Why it cannot go on, in one line, although the text is not complete; None if it can."""
        self._look()

    def append(self, token_id: int) -> None:
        """Note the next token. One that was not allowed is a `problem`."""
        self._matcher.consume_token(token_id)
        self._look()

    @property
    def allowed_without_ends(self) -> Bits:
        """The tokens that may come next, no ends among them unless there is nothing else."""
        bits = self.allowed & self._text_bits
        return bits if bits.any() else self.allowed

    def _look(self) -> None:
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self.allowed: Bits = bits[: len(self._text_bits)]
        if self._matcher.is_error():
            self.problem = _line(self._matcher.get_error())
        elif not (self.allowed & self._text_bits).any():
            self.is_complete = self._matcher.is_accepting()
            if not self.is_complete and not self.allowed.any():
                self.problem = _NOTHING_FOLLOWS


def _text_bits(vocab_size: int, end_token_ids: Sequence[int]) -> Bits:
    """All tokens that are no ends."""
    is_text = np.ones(vocab_size, dtype=np.bool_)
    is_text[list(end_token_ids)] = False
    return np.packbits(is_text, bitorder="little")


def _source(structured: StructuredOutput) -> str:
    """What `llguidance` compiles. Raises `ValueError`."""
    import llguidance

    if structured.kind in ("json", "json_object"):
        options: dict[str, Any] = {"whitespace_pattern": _WHITESPACE}
        if structured.disable_any_whitespace:
            options = {"whitespace_flexible": False}
        made = llguidance.LLMatcher.grammar_from_json_schema(structured.text, defaults=options)
        schema = json.loads(made)["grammars"][0]["json_schema"]
        return f"start: %json {json.dumps(schema)}\n{_NO_FORCING}"
    if "%llguidance" in structured.text:
        raise ValueError("%llguidance sets what is the engine's to set: leave it out")
    made = llguidance.grammar_from(structured.kind, structured.text)
    if structured.kind == "regex":
        made = json.loads(made)["grammars"][0]["lark_grammar"]
    return f"{made}\n{_NO_FORCING}"


def _refused(structured: StructuredOutput, problem: str) -> InvalidInput:
    return InvalidInput(f"{structured.kind} cannot be followed: {_line(problem)}")


def _line(problem: str) -> str:
    """What `llguidance` says is wrong, in one line and without a view of its insides."""
    lines = [line.strip() for line in problem.splitlines() if "<non-verbose/>" not in line]
    lines = [line for line in lines if line]
    # Of a regular expression the reason comes last, below a picture of the place.
    reasons = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    told = next(iter(reasons or lines), "it is too complex")
    told = told.rpartition("failed to compile JSON schema: ")[2]
    if told.startswith("panic"):
        told = "it is too complex"
    if told.startswith("NoExtension"):
        told = _NOTHING_FOLLOWS
    return told if len(told) <= _MAX_TOLD else told[: _MAX_TOLD - 1] + "…"


class _Vocabulary:
    """The model's tokens in bytes, as `llguidance` wants them.

    Without an end token of the model's own there is one behind all others, which nobody can say:
    `llguidance` cannot do without.
    """

    def __init__(self, texts: TokenTexts, vocab_size: int, end_token_ids: Sequence[int]) -> None:
        self.tokens = [texts.token_bytes(i) for i in range(vocab_size)]
        self.special_token_ids = sorted(i for i in texts.special_token_ids if i < vocab_size)
        self.bos_token_id: int | None = None
        self.eos_token_id = end_token_ids[0] if end_token_ids else vocab_size
        if not end_token_ids:
            self.tokens.append(b"</s>")
            self.special_token_ids.append(vocab_size)

    def __call__(self, text: bytes) -> list[int]:
        """The tokens of a text; nobody asks, since none is forced."""
        return []
