"""The subcommands of `pagedkv`, and what the help of each looks like.

Each subcommand is a function in a module of its own, registered here. Such a module imports what
is slow to load inside the function, so that `pagedkv --help` and the other commands stay quick.
"""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from pagedkv._version import __version__
from pagedkv.cli.announcing import speaking_for
from pagedkv.cli.generate import generate
from pagedkv.cli.option_names import in_option_names
from pagedkv.cli.serve import serve
from pagedkv.cli.simulate import simulate
from pagedkv.cli.walkthrough import walkthrough
from pagedkv.errors import InvalidInput, TraceError


class Command(TyperCommand):
    """A command that says when it must compile, and names options as they are typed.

    Its help groups them by panel.

    The groups are plain: Typer's own boxes leave names and defaults no room at 80 columns.
    """

    def invoke(self, ctx: Any) -> Any:
        """Run the command; help and mistakes in the command line never come here."""
        from pagedkv.compiling import on_first_compilation

        with on_first_compilation(_say_compiling), speaking_for(self.get_params(ctx)):
            try:
                return super().invoke(ctx)
            except TraceError:
                raise  # names fields of a file
            except InvalidInput as error:
                message = in_option_names(str(error), self.get_params(ctx))
                raise InvalidInput(message) from error

    def get_short_help_str(self, limit: int = 0) -> str:
        """What the list of commands says of it: a whole sentence, in as many lines as it takes."""
        return " ".join((self.help or "").partition("\n\n")[0].split()).rstrip(".")

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


def _say_compiling() -> None:
    print("pagedkv: compiling for this machine, once; takes under 30 seconds", file=sys.stderr)
