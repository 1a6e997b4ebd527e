"""`StructuredOutput`: what the text of an answer must be.

A JSON value of a schema, a text of a regular expression, one of some texts, or a text of a grammar.
The names are vLLM's. `docs/structured-output.md` is the page for users.
"""

from __future__ import annotations

import json as json_text
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pagedkv.errors import InvalidInput

MAX_STRUCTURE_CHARACTERS = 65_536
"""Of a schema, an expression, a grammar, or all choices together: to compile more takes seconds."""

MAX_SCHEMA_NESTING = 64
"""Lists and objects inside each other in a schema; vLLM's number."""

_KINDS = ("json", "regex", "choice", "grammar", "json_object")


@dataclass(frozen=True, kw_only=True)
class StructuredOutput:
    """What the text of an answer must be: exactly one of the first five is given.

    >>> StructuredOutput(choice=["yes", "no"]).choice
    ('yes', 'no')
    >>> StructuredOutput(json={"type": "boolean"}).json
    '{"type":"boolean"}'

    Raises `InvalidInput`, one line that names the field. Whether there is such a grammar, and
    whether it can be followed, is found out when it is compiled.
    """

    json: str | bool | Mapping[str, Any] | None = None
    """A JSON schema, as text or parsed. It is kept as text, its properties in their order: that
    in which an answer has them."""
    regex: str | None = None
    """A regular expression, in the syntax of Rust's `regex`, that the whole text matches."""
    choice: Sequence[str] | None = None
    """Texts, one of which it is."""
    grammar: str | None = None
    """A grammar in Lark's notation, or in GBNF."""
    json_object: bool | None = None
    """Any JSON object."""
    disable_any_whitespace: bool = False
    """No blanks and no lines between the parts of JSON."""

    def __post_init__(self) -> None:
        given = [name for name in _KINDS if getattr(self, name) not in (None, False)]
        if self.json is False:  # a schema, that of nothing
            given.insert(0, "json")
        if len(given) != 1:
            told = " and ".join(given) or "nothing"
            raise InvalidInput(
                f"structured output is given {told}: give one of {', '.join(_KINDS)}"
            )
        for name in ("json_object", "disable_any_whitespace"):
            if not isinstance(getattr(self, name), bool | None):
                raise InvalidInput(f"{name} is {getattr(self, name)!r}: give True or False")
        for name in ("regex", "grammar"):
            if not isinstance(getattr(self, name), str | None):
                raise InvalidInput(f"{name} is {type(getattr(self, name)).__name__}: give text")
        if self.json is not None:
            object.__setattr__(self, "json", _schema_text(self.json))
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))
        _check_text(self.kind, self.text)

    @property
    def kind(self) -> str:
        """The name of the field that is given."""
        return next(name for name in _KINDS if getattr(self, name) not in (None, False))

    @property
    def text(self) -> str:
        """What is given, as text; choices as a list in JSON."""
        if self.choice is not None:
            return json_text.dumps(self.choice)
        if self.json_object:
            return '{"type":"object"}'
        return str(getattr(self, self.kind))


def _schema_text(schema: Any) -> str:
    try:
        parsed = json_text.loads(schema) if isinstance(schema, str) else schema
        if not isinstance(parsed, bool | Mapping):
            raise InvalidInput(f"json is {type(parsed).__name__}: a schema is an object")
        if parsed is False:
            raise InvalidInput("json is false, the schema that nothing has")
        check_nesting(parsed)
        whole = {} if parsed is True else parsed
        return json_text.dumps(whole, separators=(",", ":"), allow_nan=False, default=dict)
    except RecursionError:
        raise InvalidInput("json is nested too deeply") from None
    except InvalidInput:
        raise
    except (TypeError, ValueError) as problem:
        raise InvalidInput(f"json is no JSON schema: {problem}") from None


def check_nesting(value: Any) -> None:
    """Raise `InvalidInput` for JSON that is nested too deeply."""
    layer = [value]
    for _ in range(MAX_SCHEMA_NESTING + 1):
        parts = [tuple(p.values()) if isinstance(p, Mapping) else p for p in layer]
        nested = [p for p in parts if isinstance(p, list | tuple)]
        layer = [inner for part in nested for inner in part]
        if not nested:
            return
    raise InvalidInput(f"json is nested more than {MAX_SCHEMA_NESTING} levels deep")


def _choices(choices: Any) -> tuple[str, ...]:
    """Choices as a tuple. Half a character could not be said, and JSON's escapes would hide it."""
    is_list = isinstance(choices, Sequence) and not isinstance(choices, str | bytes)
    if not is_list or not choices or not all(isinstance(choice, str) for choice in choices):
        raise InvalidInput("choice is no list of texts: give at least one")
    for choice in choices:
        _check_text("choice", choice)
    return tuple(choices)


def _check_text(kind: str, text: str) -> None:
    if len(text) > MAX_STRUCTURE_CHARACTERS:
        raise InvalidInput(
            f"{kind} has {len(text)} characters, at most {MAX_STRUCTURE_CHARACTERS} are taken"
        )
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidInput(f"{kind} has half a character: a lone surrogate") from None
