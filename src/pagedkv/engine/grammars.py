"""Grammars compiled for a model's tokens, and where in one an answer is.

`llguidance` (the extra `structured`) does both: it compiles what a `StructuredOutput` says, and
tells which tokens may come next. A grammar is compiled once for several answers, and each of these
has a place of its own in it (`GrammarPlace`), which is a function of the tokens that it has said:
forks and preemptions need nothing else. What they share is a memory of the texts inside words,
which has an end (`MAX_LEXER_STATES`): so that those of yesterday do not use up what one of today
needs, a grammar is compiled anew after some answers (`MAX_ANSWERS`), and when one has failed.

Whoever asks for a grammar compiles it in its own thread, outside the interpreter's lock; the thread
that runs the steps never has to.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from pagedkv.engine.detokenizer import TokenTexts
from pagedkv.engine.structured_output import StructuredOutput
from pagedkv.errors import InvalidInput

Bits: TypeAlias = NDArray[np.uint8]
"""One bit a token, the lowest of a byte first: whether it may come next."""

MAX_GRAMMARS = 32
"""Compiled grammars that are kept, those asked for last."""

MAX_ANSWERS = 16
"""Answers that share what is remembered; those of one request always do."""

MAX_LEXER_STATES = 50_000
"""What is remembered of the texts inside words, by all answers that share it: 0.4 to 2 kB each."""

MAX_GRAMMAR_SYMBOLS = 10_000
"""A list of what can come next is at most about as long, and to make it takes its square: 10 ms for
4,000 entries. A schema has 6 to 10 a property."""

_MASK_FUEL = 50_000
"""What reading on inside words may take for one token: 5 ms. Half goes into the first token of
`\\p{L}{1,50}`."""

_MASK_ITEMS, _ROW_ITEMS = 16_000, 2_000
"""Entries that may be made for one token, and that may be left when it is said, of what can come
next: 15 ms. An object of 300 properties that may be left out is within them, one of 500 is not."""

_GRAMMAR_MASK_ITEMS, _GRAMMAR_ROW_ITEMS = 4_000, 500
"""As `_MASK_ITEMS`, of the grammars that somebody wrote: up to 27 ms. Such a one may say the same
text in several ways, and then each entry takes longer. One of Python's expressions makes 3,000."""

_STACK_BYTES = 128 << 20
"""Of the thread that compiles: `llguidance` goes down into rules of rules and references of
references, and has no end to that but the process's. The longest chain that a structure has
characters for took less than 32 MiB."""

_WHITESPACE = r"[ \n\r\t]{0,40}"
"""Between the parts of JSON. Without an end a model that likes lines would write nothing else."""

_NO_FORCING = '%llguidance {"no_forcing": true}\n'
"""Where only one text can follow, let the model cut it into tokens as it likes. `llguidance` would
have it say those that the tokenizer would write; to find these it looks ahead as far as the text is
certain, which has no end for `start: /a+/ /a+/`."""

_NOTHING_FOLLOWS = "no text of the model's tokens is like that"
_TOO_MUCH_FOLLOWS = (
    "too much can come next, as with hundreds of properties that may be left out, or a grammar "
    "that says one text in many ways"
)
_TOO_MANY_TEXTS = "there are too many texts to tell apart, as with repetitions inside repetitions"
_TOLD_AS = {
    "NoExtension": _NOTHING_FOLLOWS,
    "Too many items": _TOO_MUCH_FOLLOWS,
    "Current row has": _TOO_MUCH_FOLLOWS,
    "too many states": _TOO_MANY_TEXTS,
    "too many expressions": _TOO_MANY_TEXTS,
    "grammar size": "it is too large, as with a thousand properties",
    "panic": "it is too complex",
}
"""What `llguidance` says of its limits, and what that means to who wrote the structure."""

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
        """Whether it is compiled already, so that who asks for it next need not wait."""
        with self._keeping:
            return self._found(structured) is not None

    def compiled(self, structured: StructuredOutput) -> Grammar:
        """The grammar, compiled now if it was not.

        Raises `InvalidInput`, one line, for what is no grammar, for one that allows no text, and
        where `llguidance` or a tokenizer is missing.
        """
        with self._keeping:
            found = self._found(structured)
        if found is not None:
            return found
        grammar = self._compile(structured)
        with self._keeping:
            self._kept[structured] = grammar
            if len(self._kept) > MAX_GRAMMARS:
                self._kept.popitem(last=False)
        return grammar

    def _found(self, structured: StructuredOutput) -> Grammar | None:
        """The kept one, as one that was asked for last; None where one must be compiled."""
        grammar = self._kept.get(structured)
        if grammar is None:
            return None
        if grammar.is_worn:
            del self._kept[structured]
            return None
        self._kept.move_to_end(structured)
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
            source = _source(structured)
            matcher = _with_deep_stack(
                lambda: llguidance.LLMatcher(
                    self._tokens, source, limits=_limits(structured), log_level=0
                )
            )
        except ValueError as problem:
            raise _refused(structured, str(problem)) from None
        if matcher.is_error():
            raise _refused(structured, matcher.get_error())
        grammar = Grammar(matcher, self._vocab_size, self._ends)
        if grammar.start.problem is not None:
            raise _refused(structured, grammar.start.problem)
        if grammar.start.is_complete:
            raise _refused(structured, "it allows no text but the empty one")
        return grammar


_Made = TypeVar("_Made")
_setting_stacks = threading.Lock()


def _with_deep_stack(make: Callable[[], _Made]) -> _Made:
    """What `make` makes in a thread of its own, whose stack has `_STACK_BYTES`."""
    made: list[_Made] = []
    failures: list[Exception] = []

    def run() -> None:
        try:
            made.append(make())
        except Exception as failure:
            failures.append(failure)

    thread = threading.Thread(target=run, name="pagedkv-grammar", daemon=True)
    with _setting_stacks:
        usual = threading.stack_size(_STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(usual)
    thread.join()
    if failures:
        raise failures[0]
    return made[0]


class Grammar:
    """A compiled grammar. `start`: the place before the first token."""

    def __init__(self, matcher: Any, vocab_size: int, end_token_ids: Sequence[int]) -> None:
        self.text_bits = _text_bits(vocab_size, end_token_ids)
        self.has_failed = False
        """Whether an answer could not go on: maybe none can, since what is remembered is full."""
        self._num_begun = 0
        self.start = GrammarPlace(self, matcher)
        self.start.look()

    def begin(self) -> GrammarPlace:
        """The place of an answer that has no token yet. Nothing is computed."""
        self._num_begun += 1
        return self.start.copy()

    @property
    def is_worn(self) -> bool:
        """Whether the next request should have one of its own."""
        return self.has_failed or self._num_begun >= MAX_ANSWERS


class GrammarPlace:
    """Where in its grammar an answer is."""

    __slots__ = ("_grammar", "_matcher", "allowed", "is_complete", "problem")

    def __init__(self, grammar: Grammar, matcher: Any) -> None:
        self._grammar = grammar
        self._matcher = matcher
        self.allowed: Bits = np.zeros_like(grammar.text_bits)
        """The tokens that may come next, ends among them where the text may end."""
        self.is_complete = False
        """Whether the text is all that it may be: nothing but an end can follow."""
        self.problem: str | None = None
        """Why it cannot go on, in one line, although the text is not complete; None if it can."""

    def copy(self) -> GrammarPlace:
        """The same place, from which another answer goes on."""
        made = GrammarPlace(self._grammar, self._matcher.deep_copy())
        made.allowed, made.is_complete, made.problem = self.allowed, self.is_complete, self.problem
        return made

    def append(self, token_id: int) -> None:
        """Note the next token. One that was not allowed is a `problem`, as is whatever fails."""
        try:
            self._matcher.consume_token(token_id)
            self.look()
        except Exception as failure:  # others are in the same step, and nothing of it is theirs
            self.problem = _line(str(failure) or type(failure).__name__)
        if self.problem is not None:
            self._grammar.has_failed = True

    def look(self) -> None:
        """Find out what may come next."""
        text_bits = self._grammar.text_bits
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self.allowed = bits[: len(text_bits)]
        if self._matcher.is_error():
            self.problem = _line(self._matcher.get_error())
        elif not (self.allowed & text_bits).any():
            self.is_complete = self._matcher.is_accepting()
            if not self.is_complete and not self.allowed.any():
                self.problem = _NOTHING_FOLLOWS

    @property
    def allowed_without_ends(self) -> Bits:
        """The tokens that may come next, no ends among them unless there is nothing else."""
        bits = self.allowed & self._grammar.text_bits
        return bits if bits.any() else self.allowed


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
    if structured.choice is not None:
        # One word, whatever it is: as many words as choices would be an entry each.
        made = "start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, structured.choice))
    elif structured.kind == "regex":
        made = llguidance.grammar_from("regex", structured.text)
        made = json.loads(made)["grammars"][0]["lark_grammar"]
    elif "%llguidance" in structured.text:
        raise ValueError("%llguidance sets what is the engine's to set: leave it out")
    else:
        made = llguidance.grammar_from("grammar", structured.text)
    return f"{made}\n{_NO_FORCING}"


def _limits(structured: StructuredOutput) -> Any:
    """How far `llguidance` goes, for a token and in all, before it gives an answer up."""
    import llguidance

    is_free = structured.kind == "grammar" and not structured.is_plain
    return llguidance.LLParserLimits(
        step_max_items=_GRAMMAR_MASK_ITEMS if is_free else _MASK_ITEMS,
        max_items_in_row=_GRAMMAR_ROW_ITEMS if is_free else _ROW_ITEMS,
        step_lexer_fuel=_MASK_FUEL,
        max_lexer_states=MAX_LEXER_STATES,
        max_grammar_size=MAX_GRAMMAR_SYMBOLS,
        verbose_errors=False,
    )


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
    told = re.sub("^(parser|lexer) error: ", "", told, flags=re.IGNORECASE)
    told = next((meaning for said, meaning in _TOLD_AS.items() if told.startswith(said)), told)
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
