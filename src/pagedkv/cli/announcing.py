"""What a command says on stderr while it works."""

from __future__ import annotations

import contextlib
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import Any

from pagedkv.cli.option_names import in_option_names

_parameters: ContextVar[tuple[Any, ...]] = ContextVar("parameters", default=())
"""Those of the command that runs."""


@contextlib.contextmanager
def speaking_for(parameters: Iterable[Any]) -> Iterator[None]:
    """Within, a command with these parameters runs."""
    token = _parameters.set(tuple(parameters))
    try:
        yield
    finally:
        _parameters.reset(token)


def say(line: str) -> None:
    """Write a line, with options named as they are typed; a terminal gets it folded."""
    if parameters := _parameters.get():
        line = in_option_names(line, parameters)
    if sys.stderr.isatty():  # elsewhere a line stays one, so that it can be searched for
        width = shutil.get_terminal_size().columns
        line = textwrap.fill(line, width, subsequent_indent="  ", break_on_hyphens=False)
    print(line, file=sys.stderr, flush=True)
