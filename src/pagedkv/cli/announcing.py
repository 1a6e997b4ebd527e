"""What a command says on stderr while it works."""

from __future__ import annotations

import shutil
import sys
import textwrap

import click

from pagedkv.cli.option_names import in_option_names


def say(line: str) -> None:
    """Write a line, with options named as they are typed; a terminal gets it folded."""
    context = click.get_current_context(silent=True)
    if context is not None:
        line = in_option_names(line, context.command.get_params(context))
    if sys.stderr.isatty():  # elsewhere a line stays one, so that it can be searched for
        width = shutil.get_terminal_size().columns
        line = textwrap.fill(line, width, subsequent_indent="  ", break_on_hyphens=False)
    print(line, file=sys.stderr, flush=True)
