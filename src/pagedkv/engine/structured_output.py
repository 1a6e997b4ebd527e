"""`StructuredOutput`: what the text of an answer must be.

A JSON value of a schema, a text of a regular expression, one of some texts, or a text of a grammar.
The names are vLLM's. `docs/structured-output.md` is the page for users.
"""

from __future__ import annotations

import json as json_text
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from pagedkv.errors import InvalidInput

MAX_STRUCTURE_CHARACTERS = 65_536
"""Of a schema, an expression, a grammar, or all choices together: to compile more takes seconds."""

MAX_SCHEMA_NESTING = 64
"""Lists and objects inside each other in a schema; vLLM's number."""

MAX_PROPERTIES = 1_600
"""Of all objects in a schema: more are too many for a grammar, which takes a second to find out."""

MAX_GRAMMAR_LINES = 500
"""Of a grammar: to turn more of GBNF's rules into Lark's takes their square, 0.2 s for these."""

MAX_INTERSECTED_PATTERNS = 12
"""Patterns and formats of a schema that one text may have to match together: whether there is such
a text takes twice as long for each more, from 16 on seconds."""

MAX_MULTIPLE = 10_000
"""What numbers are multiples of, without its zeros, and the least common multiple of all of these,
since they may be of one number: 44 ms to compile; 100,000 takes a second."""

_KINDS = ("json", "regex", "choice", "grammar", "json_object")

_COMBINING = frozenset({"allOf", "anyOf", "oneOf", "$ref"})
"""What a schema has besides its own keywords, to hold together with them."""


_LITERALS = r'"(?:\\[\s\S]|[^"\\])*+\\?(?:"|\Z)|(?://|#)[^\n]*|/(?:\\.|[^/\\\n])*+\\?(?:/|$)'
_CLASSES = r"|\[(?:\\.|[^\]\\\n])*+\\?(?:\]|$)"
"""Texts, comments and expressions in a grammar, and classes of characters in GBNF's. What has no
end is read as far as it goes, or it would be read again and again."""

_COMBINED = re.compile("[&~]")

_INNER_SCHEMA = re.compile(r"%json\s*")
"""What stands before a schema in a grammar."""


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
    is_plain: bool = False
    """Of a grammar: whether it has one way to say a text. It may be followed as far as a schema."""
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
        if self.grammar is not None:
            _check_inner_schemas(self.grammar)
            _check_operators(self.grammar)

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
        parsed = schema
        if isinstance(schema, str):
            _check_text("json", schema)  # before anybody parses it
            parsed = json_text.loads(schema)
        if not isinstance(parsed, bool | Mapping):
            raise InvalidInput(f"json is {type(parsed).__name__}: a schema is an object")
        if parsed is False:
            raise InvalidInput("json is false, the schema that nothing has")
        check_nesting(parsed)
        _check_cost(parsed)
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


def _check_cost(schema: Any) -> None:
    """Refuse what would take seconds to compile, as far as it can be told by its looks."""
    num_properties = num_patterns = num_intersected = 0
    multiple = 1
    to_see = [(schema, False)]
    while to_see:
        part, is_intersected = to_see.pop()
        if isinstance(part, list | tuple):
            to_see += [(inner, is_intersected) for inner in part]
        if not isinstance(part, Mapping):
            continue
        multiple = math.lcm(multiple, _multiple(part.get("multipleOf")))
        if multiple > MAX_MULTIPLE:
            raise InvalidInput(
                f"json has multipleOf {part['multipleOf']}: at most {MAX_MULTIPLE} can be "
                "followed, and so of all the least common multiple"
            )
        properties = part.get("properties")
        num_properties += len(properties) if isinstance(properties, Mapping) else 0
        has_pattern = isinstance(part.get("pattern"), str) or isinstance(part.get("format"), str)
        is_combined = is_intersected or not _COMBINING.isdisjoint(part)
        num_patterns += has_pattern
        num_intersected += is_combined and (has_pattern or "$ref" in part)
        to_see += [
            (inner, name == "allOf" or (is_combined and name in _COMBINING))
            for name, inner in part.items()
        ]
    if num_properties > MAX_PROPERTIES:
        raise InvalidInput(
            f"json has {num_properties} properties, at most {MAX_PROPERTIES} can be followed"
        )
    if min(num_patterns, num_intersected) > MAX_INTERSECTED_PATTERNS:
        raise InvalidInput(
            f"json has {num_intersected} patterns that may have to match together, at most "
            f"{MAX_INTERSECTED_PATTERNS} can be followed"
        )


def _check_inner_schemas(grammar: str) -> None:
    """Refuse a grammar for the schemas in it that would be refused by themselves."""
    decoder = json_text.JSONDecoder()
    end = 0
    while found := _INNER_SCHEMA.search(grammar, end):
        try:
            schema, end = decoder.raw_decode(grammar, found.end())
            check_nesting(schema)
            _check_cost(schema)
        except RecursionError:
            raise InvalidInput("grammar: json is nested too deeply") from None
        except InvalidInput as problem:
            raise InvalidInput(f"grammar: {problem}") from None
        except ValueError:
            raise InvalidInput("grammar: no JSON follows %json") from None


def _check_operators(grammar: str) -> None:
    """Refuse a grammar that wants texts in several expressions at once, or in none of them."""
    literals = _LITERALS + (_CLASSES if "::=" in grammar else "")
    if _COMBINED.search(re.sub(literals, " ", grammar, flags=re.MULTILINE)):
        raise InvalidInput("grammar has & or ~, which may take for ever to compile: leave them out")


def _multiple(given: Any) -> int:
    """The digits of a `multipleOf`, as a whole number; 1 for what is none."""
    if not isinstance(given, int | float) or isinstance(given, bool) or not math.isfinite(given):
        return 1
    digits = Decimal(repr(given)).normalize().as_tuple().digits
    return int("".join(map(str, digits))) or 1


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
    num_lines = len(text.splitlines())
    if kind == "grammar" and num_lines > MAX_GRAMMAR_LINES:
        raise InvalidInput(f"grammar has {num_lines} lines, at most {MAX_GRAMMAR_LINES} are taken")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidInput(f"{kind} has half a character: a lone surrogate") from None
