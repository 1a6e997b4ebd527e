"""Calls of functions in the shapes of OpenAI's API."""

from __future__ import annotations

import uuid
from typing import Any

from pagedkv.server.tool_calls import Arguments, CallBegun, CallReader, Content, Said

_SLICE = 1_024


class CallDeltas:
    """What the events of a stream add to one choice, in which functions may be called."""

    def __init__(self, reader: CallReader) -> None:
        self._reader = reader
        self._has_role = False
        self._last = -1  # the index of the call that was begun last

    def after(self, text: str, reason: str | None) -> tuple[list[dict[str, Any]], str | None]:
        """What a piece of its text adds, and why it ends with it, if it does (`reason`)."""
        said = list(self._reader.append(text))
        if reason is not None:
            said += self._reader.end()
            reason = reason_to_end(reason, self._reader)
        return [self._delta(piece) for piece in said], reason

    def with_role(self, delta: dict[str, Any]) -> dict[str, Any]:
        """A delta, with whose it is if it is the first one."""
        delta = delta if self._has_role else {"role": "assistant", **delta}
        self._has_role = True
        return delta

    def _delta(self, said: Said) -> dict[str, Any]:
        if isinstance(said, Content):
            return {"content": said.text}
        if isinstance(said, Arguments):
            return {"tool_calls": [{"index": self._last, "function": {"arguments": said.text}}]}
        self._last += 1
        return {"tool_calls": [{"index": self._last, **_call(said.name)}]}


def called_message(reader: CallReader, text: str) -> dict[str, Any]:
    """The content of a whole answer and its calls, as a message has them."""
    content = ""
    calls: list[dict[str, Any]] = []
    # In slices: after each call readers look at all that is left of a piece.
    slices = (text[place : place + _SLICE] for place in range(0, len(text), _SLICE))
    for said in (*(s for piece in slices for s in reader.append(piece)), *reader.end()):
        if isinstance(said, Content):
            content += said.text
        elif isinstance(said, CallBegun):
            calls.append(_call(said.name))
        else:
            calls[-1]["function"]["arguments"] += said.text
    if not calls:
        return {"content": content}
    return {"content": content or None, "tool_calls": calls}


def reason_to_end(reason: str, reader: CallReader) -> str:
    """Why an answer ended, once `reader` has read it all: to have its calls made, it may be."""
    return "tool_calls" if reason == "stop" and reader.has_called else reason


def _call(name: str) -> dict[str, Any]:
    """A call without its arguments."""
    function = {"name": name, "arguments": ""}
    return {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function}
