"""What a whole text says and calls, by one expression."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any

_CALL = re.compile(
    r"""
    \s{0,64}<tool_call>
    (?P<body> \s*\{ (?: "(?:\\.|[^"\\\n])*["\n] | [^"] )*? )  # strings, and what is none
    (?: (?P<close></tool_call>) | (?:"(?:\\.|[^"\\\n])*\\?)?\Z )
    """,
    re.DOTALL | re.VERBOSE,
)


def called_text(text: str, names: Collection[str]) -> tuple[str, list[tuple[str, Any]]]:
    """The content of a text that has ended, and its calls: names and arguments."""
    content, calls, at, is_behind_call = "", [], 0, False
    for found in _CALL.finditer(text):
        call = _call(found["body"], names) if found["close"] else None
        before = text[at : found.start()]
        if call is None:
            content += before + found[0]
            is_behind_call = False
        else:
            content += before
            calls.append(call)
            is_behind_call = True
        at = found.end()
    rest = text[at:]
    is_space = rest.isspace() and len(rest) <= 64
    return content + ("" if is_behind_call and is_space else rest), calls


def _call(body: str, names: Collection[str]) -> tuple[str, Any] | None:
    def refuse(constant: str) -> Any:
        raise ValueError(constant)

    try:
        call = json.loads(body, parse_constant=refuse)
    except ValueError:
        return None
    if set(call) != {"name", "arguments"} or not isinstance(call["arguments"], dict):
        return None
    is_known = isinstance(call["name"], str) and call["name"] in names
    return (call["name"], call["arguments"]) if is_known else None
