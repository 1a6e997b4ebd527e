"""Calls of functions in the text of an answer, in the form that Hermes and Qwen models are taught:

    <tool_call>
    {"name": "weather", "arguments": {"city": "Oslo"}}
    </tool_call>

Text comes in pieces, cut anywhere, and leaves as what a client is told: content, and calls.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

OPEN, CLOSE = "<tool_call>", "</tool_call>"

MAX_SPACE = 64
"""Characters of whitespace that wait for what follows them."""

_HEAD, _MIDDLE, _TAIL = OPEN + '\n{"name": "', '", "arguments": ', "}\n" + CLOSE
"""Around the name and the arguments of a call that a grammar forces."""

_WHITESPACE = r"[ \n\r\t]{0,40}"
"""Between the parts of the arguments. Without an end a model that likes lines would write nothing
else."""


@dataclass(frozen=True)
class Content:
    """Text of the answer that is no call."""

    text: str


@dataclass(frozen=True)
class CallBegun:
    """A call of a function, without its arguments."""

    name: str


@dataclass(frozen=True)
class Arguments:
    """A piece of the arguments, as JSON, of the call that was begun last."""

    text: str


Said: TypeAlias = Content | CallBegun | Arguments


class CallReader(Protocol):
    """What is said in one answer, piece by piece. However its text is cut, the content together
    and the calls are the same."""

    def append(self, text: str) -> Iterator[Said]:
        """What this piece settles."""

    def end(self) -> Iterator[Said]:
        """What is left when the text has ended. No piece may come after it."""

    @property
    def has_called(self) -> bool:
        """Whether there were calls, and all that were begun are whole."""


class FreeCalls:
    """Calls that the model writes or not, as it likes. Each is told as a whole.

    A call is JSON between two tags, with the name of one of `names` and an object as arguments, and
    nothing else. Whatever else stands between tags stays content, tags included, and so does a call
    without an end. Whitespace before a call is a part of it, and so is that behind the last one if
    nothing else follows; at most `MAX_SPACE` characters. Calls after the first `max_calls` are left
    out.

    Content waits as long as it may be the beginning of a tag, or of the whitespace before one.
    """

    def __init__(self, names: Collection[str], *, max_calls: int | None = None) -> None:
        self._names = names
        self._max_calls = max_calls
        self._num_calls = 0
        self._held = ""
        """What may be whitespace and the beginning of a tag."""
        self._is_behind_call = False  # nothing was said since
        self._tag = ""
        """The opening tag of the call that is being read, with the whitespace before it."""
        self._parts: list[str] = []  # what was read behind it
        self._is_object = False  # whether there is the brace that it has to begin with
        self._is_quoted = False  # inside a string of JSON, in which a tag is none
        self._is_escaped = False  # behind a backslash in it
        self._num_matched = 0  # characters of the closing tag that were read last

    def append(self, text: str) -> Iterator[Said]:
        """What this piece settles."""
        while text:
            text = yield from self._inside(text) if self._tag else self._outside(text)

    def end(self) -> Iterator[Said]:
        """What is left when the text has ended."""
        left = self._held + self._tag + "".join(self._parts)
        if not (self._is_behind_call and left.isspace()):
            yield from self._content(left)

    @property
    def has_called(self) -> bool:
        """Whether there were calls."""
        return self._num_calls > 0

    def _outside(self, piece: str) -> Generator[Said, None, str]:
        """Look for an opening tag; returns the text that is not read yet."""
        text = self._held + piece
        before, tag, rest = text.partition(OPEN)
        if not tag:
            before = text[: len(text) - _num_held(text, OPEN)]
        before = before[: max(len(before.rstrip()), len(before) - MAX_SPACE)]
        yield from self._content(before)
        self._held = "" if tag else text[len(before) :]
        if tag:
            self._tag = text[len(before) : len(text) - len(rest)]
            self._parts, self._num_matched = [], 0
            self._is_object = self._is_quoted = self._is_escaped = False
        return rest

    def _inside(self, piece: str) -> Generator[Said, None, str]:
        """Look for the closing tag; returns the text that is not read yet."""
        for place, character in enumerate(piece):
            if not self._is_object:
                self._is_object = character == "{"
                if not (self._is_object or character.isspace()):
                    tag, self._tag = self._tag, ""
                    body = "".join([*self._parts, piece])
                    self._parts = []
                    yield from self._content(tag)
                    return body
            elif self._is_escaped:
                self._is_escaped = False
            elif self._is_quoted:
                self._is_escaped = character == "\\"
                self._is_quoted = character not in '"\n'  # no string has a line's end in it
            elif character == CLOSE[self._num_matched]:
                self._num_matched += 1
                if self._num_matched == len(CLOSE):
                    text = "".join([*self._parts, piece[: place + 1]])
                    tag, self._tag, self._parts = self._tag, "", []
                    yield from self._call(tag, text.removesuffix(CLOSE))
                    return piece[place + 1 :]
            else:
                self._num_matched = int(character == CLOSE[0])
                self._is_quoted = character == '"'
        self._parts.append(piece)
        return ""

    def _call(self, tag: str, body: str) -> Iterator[Said]:
        """What stands between an opening tag and a closing one."""
        try:
            call = json.loads(body)
            name, arguments = call["name"], call["arguments"]
            if len(call) > 2 or name not in self._names or not isinstance(arguments, dict):
                raise ValueError
            said = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
            said.encode()
        except (ValueError, TypeError, KeyError, RecursionError):
            yield from self._content(tag + body + CLOSE)
            return
        self._is_behind_call = True
        self._num_calls += 1
        if self._max_calls is None or self._num_calls <= self._max_calls:
            yield CallBegun(name)
            yield Arguments(said)

    def _content(self, text: str) -> Iterator[Said]:
        if text:
            self._is_behind_call = False
            yield Content(text)


class ForcedCalls:
    """Calls that a grammar has the model write (`call_grammar`): arguments are told as they come.

    An answer that is cut off ends in the middle of them.
    """

    def __init__(self) -> None:
        self._held = ""
        self._until = 0  # place in `_ORDER` of what the text is read up to
        self._num_calls = 0  # whole ones

    def append(self, text: str) -> Iterator[Said]:
        """What this piece settles."""
        text = self._held + text
        while True:
            mark = _ORDER[self._until]
            before, found, rest = text.partition(mark)
            if not found:
                break
            if mark is _MIDDLE:
                yield CallBegun(before)
            if mark is _TAIL and before:
                yield Arguments(before)
            self._num_calls += mark is _TAIL
            text, self._until = rest, (self._until + 1) % len(_ORDER)
        self._held = text
        if _ORDER[self._until] is _TAIL:
            num_told = len(text) - _num_held(text, _TAIL)
            if num_told:
                yield Arguments(text[:num_told])
            self._held = text[num_told:]

    def end(self) -> Iterator[Said]:
        """Nothing: what is left is the form of a call, and not what is called."""
        yield from ()

    @property
    def has_called(self) -> bool:
        """Whether there were calls, and all that were begun are whole."""
        return self._num_calls > 0 and self._until == 0


_ORDER = (_HEAD, _MIDDLE, _TAIL)


def call_grammar(schemas: Mapping[str, str], otherwise: str | None = None, *, is_one: bool) -> str:
    """The grammar of answers that are calls of functions, each by the schema of its arguments.

    `schemas`: of each function that may be called, as JSON. `otherwise`: of answers that call none,
    if there may be such. `is_one`: exactly one call, else one or more.
    """
    functions = " | ".join(
        f"{json.dumps(name + _MIDDLE)} arguments_{place}" for place, name in enumerate(schemas)
    )
    lines = [
        "start: call" + ("" if is_one else r' ("\n" call)*') + (" | answer" if otherwise else ""),
        f"call: {json.dumps(_HEAD)} function {json.dumps(_TAIL)}",
        f"function: {functions}",
    ]
    parts = {f"arguments_{place}": schema for place, schema in enumerate(schemas.values())}
    if otherwise:
        parts["answer"] = otherwise
    for name, schema in parts.items():
        whole = {**json.loads(schema), "x-guidance": {"whitespace_pattern": _WHITESPACE}}
        # No % in it: behind one the grammar's own words begin.
        lines.append(
            f"{name}: %json " + json.dumps(whole, separators=(",", ":")).replace("%", r"\u0025")
        )
    return "\n".join(lines)


def tools_problem(tokenizer: Any) -> str | None:
    """Why a model cannot be given functions to call; None if it can.

    Its chat template has to show them, and to write calls in the form that is read here: what a
    template does not show of a chat is missing from the prompt without a word.
    """
    function = {"name": "probe", "description": "It is only a probe.", "parameters": {}}
    call = {"type": "function", "function": {"name": "probe", "arguments": {"place": "Oslo"}}}
    asked = {"role": "user", "content": "Hello"}
    called = {"role": "assistant", "content": "", "tool_calls": [call]}

    def rendered(messages: Sequence[Any], **options: Any) -> str:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **options))

    tools = [{"type": "function", "function": function}]
    try:
        if rendered([asked], tools=tools) == rendered([asked]):
            return "its chat template does not show them to the model"
        reader = FreeCalls(["probe"])
        said = [*reader.append(rendered([asked, called], tools=tools)), *reader.end()]
    except Exception as problem:  # templates raise what they like
        line = (str(problem) or type(problem).__name__).splitlines()[0]
        return f"its chat template refuses them: {line}"
    if CallBegun("probe") not in said or Arguments('{"place": "Oslo"}') not in said:
        return f"its chat template does not write calls as JSON between {OPEN} and {CLOSE}"
    return None


def _num_held(text: str, mark: str) -> int:
    """The length of the longest end of `text` that is a beginning of `mark`, and not all of it."""
    longest = min(len(text), len(mark) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(mark[:n])), 0)
