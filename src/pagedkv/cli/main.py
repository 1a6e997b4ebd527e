"""The command `pagedkv`: finds the subcommand, and turns errors into one line.

Each subcommand is a function in a module of its own, registered here. Such a module imports what
is slow to load inside the function, so that `pagedkv --help` and the other commands stay quick.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any, cast

import typer
from typer.core import TyperCommand

from pagedkv._version import __version__
from pagedkv.cli.generate import generate
from pagedkv.cli.serve import serve
from pagedkv.cli.simulate import simulate
from pagedkv.cli.walkthrough import walkthrough
from pagedkv.errors import PagedKVError

BROKEN_PIPE = 1  # as Rich has it, who may notice before we do
BAD_INPUT = 2
INTERRUPTED = 130

# Bases of Typer's own errors. They are defined elsewhere from one of its releases to the next.
_USAGE_ERROR, _ANY_ERROR = cast("list[type[Exception]]", typer.BadParameter.__mro__[1:3])


class Command(TyperCommand):
    """A command that says when it must compile, and whose help groups its options by panel.

    The groups are plain: Typer's own boxes leave names and defaults no room at 80 columns.
    """

    def invoke(self, ctx: Any) -> Any:
        """Run the command; help and mistakes in the command line never come here."""
        from pagedkv.compiling import on_first_compilation

        with on_first_compilation(_say_compiling):
            return super().invoke(ctx)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments and options, those of one panel together."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                is_argument = parameter.param_type_name == "argument"
                panel = getattr(parameter, "rich_help_panel", None)
                name = panel or ("Arguments" if is_argument else "Options")
                groups.setdefault(name, []).append(record)
        for name, records in groups.items():
            with formatter.section(name):
                formatter.write_dl(records, col_max=24)


app = typer.Typer(
    name="pagedkv",
    help="Page-based memory for the key-value cache of language models.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(cls=Command)(simulate)
app.command(cls=Command)(walkthrough)
app.command(cls=Command)(generate)
app.command(cls=Command)(serve)


@app.callback(invoke_without_command=True)
def _pagedkv(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        print(f"pagedkv {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


def run(arguments: Sequence[str]) -> int:
    """Run one command and return its exit status; what it prints goes to the standard streams."""
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
    except (KeyboardInterrupt, typer.Abort):
        print(file=sys.stderr)
        return INTERRUPTED
    except PagedKVError as error:
        return _fail(str(error))
    except _ANY_ERROR as error:
        message = getattr(error, "format_message", error.__str__)().rstrip(".")
        message = message.replace("Value error, ", "")  # Typer's checker talks of itself
        if isinstance(error, _USAGE_ERROR):
            context = getattr(error, "ctx", None)
            message += f": see {context.command_path if context else 'pagedkv'} --help"
        return _fail(message[:1].lower() + message[1:])


def main() -> None:
    """Run the command line of this process, and end it with the command's exit status."""
    sys.exit(run(sys.argv[1:]))


def _say_compiling() -> None:
    print("pagedkv: compiling for this machine, once; takes under 30 seconds", file=sys.stderr)


def _fail(message: str) -> int:
    print("pagedkv: " + " ".join(message.split()), file=sys.stderr)
    return BAD_INPUT
