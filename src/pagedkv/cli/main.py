"""The command `pagedkv`: runs a subcommand, and turns errors into one line.

Importing this takes no time, and what does is imported inside `run`, so that Ctrl-C finds
somebody to answer it almost as soon as Python itself has begun.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from pagedkv.errors import PagedKVError

BROKEN_PIPE = 1  # as Rich has it, who may notice before we do
BAD_INPUT = 2
INTERRUPTED = 130

_TYPES = (("integer", "whole number"), ("number", "number"))
_BOUNDS = (
    ("Input should be less than or equal to", "give at most"),
    ("Input should be greater than or equal to", "give at least"),
    ("Value error, ", ""),
)
"""How Typer's checker, where it is pydantic, says things, and how they are said here."""


def run(arguments: Sequence[str]) -> int:
    """Run one command and return its exit status; what it prints goes to the standard streams."""
    try:
        return _run(arguments)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return INTERRUPTED


def _run(arguments: Sequence[str]) -> int:
    from typing import cast

    import typer

    from pagedkv.cli.commands import app

    # Bases of Typer's own errors. They are defined elsewhere from one of its releases to the next.
    usage_error, any_error = cast("list[type[Exception]]", typer.BadParameter.__mro__[1:3])
    try:
        status = typer.main.get_command(app)(
            args=list(arguments),
            prog_name="pagedkv",
            standalone_mode=False,
            obj=tuple(arguments),
        )
        if sys.stdout is not None:  # closed before we began
            sys.stdout.flush()
        return status if isinstance(status, int) else 0
    except BrokenPipeError:
        # The reader has enough. Python would complain when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except OSError as error:  # a full disk behind standard output, say
        # What could not be written is still in the buffer, and would fail again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _fail(f"standard output: {error.strerror or error}")
    except typer.Abort:
        raise KeyboardInterrupt from None
    except PagedKVError as error:
        return _fail(str(error))
    except any_error as error:
        message = _in_our_words(error).rstrip(".")
        if isinstance(error, usage_error):
            context = getattr(error, "ctx", None)
            message += f": see {context.command_path if context else 'pagedkv'} --help"
        return _fail(message[:1].lower() + message[1:])


def main() -> None:
    """Run the command line of this process, and end it with the command's exit status."""
    sys.unraisablehook = _interrupt_again
    sys.exit(run(sys.argv[1:]))


def _interrupt_again(lost: sys.UnraisableHookArgs) -> None:
    """Take up a Ctrl-C that came where Python can only print it, as in the locks of imports."""
    if issubclass(lost.exc_type, KeyboardInterrupt):
        import _thread
        import threading

        # From another thread and a little later: within this function it would be lost again.
        threading.Timer(0.05, _thread.interrupt_main).start()
    else:
        sys.__unraisablehook__(lost)


def _in_our_words(error: Exception) -> str:
    """What Typer says of a wrong command line, without the words of its checker."""
    import re

    message = str(getattr(error, "format_message", error.__str__)())
    found: list[dict[str, object]] = getattr(error.__context__, "errors", list)()
    value = f"{found[0]['input']!r} is" if found else "this is"
    for theirs, ours in _TYPES:
        pattern = rf"Input should be a valid {theirs}\b.*"
        message = re.sub(pattern, lambda _, ours=ours: f"{value} no {ours}", message)  # type: ignore[misc]
    for theirs, ours in _BOUNDS:
        message = message.replace(theirs, ours)
    return message


def _fail(message: str) -> int:
    print("pagedkv: " + " ".join(message.split()), file=sys.stderr)
    return BAD_INPUT
