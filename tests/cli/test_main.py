"""The command `pagedkv`: versions, help, and errors as one line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import typer

from pagedkv import __version__
from pagedkv.cli import commands, main
from pagedkv.errors import InvalidInput, NeverFits, TraceError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def command() -> Iterator[Callable[[BaseException], list[str]]]:
    """Register, for one test, a command that raises, and give its command line."""
    registered = list(commands.app.registered_commands)

    def register(error: BaseException) -> list[str]:
        def fails(count: int = typer.Option(1, min=1)) -> None:
            raise error

        commands.app.command("fails")(fails)
        return ["fails"]

    yield register
    commands.app.registered_commands[:] = registered


@pytest.mark.parametrize(
    "error",
    [
        InvalidInput("num_blocks is 0:\ngive 1 or more"),
        TraceError("no number", file="log.csv", line=3, field="ContextTokens"),
        NeverFits(request="7", needed=9, capacity=8),
    ],
)
def test_an_error_is_one_line_and_exit_status_2(
    error: Exception,
    command: Callable[[BaseException], list[str]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main.run(command(error)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"pagedkv: {' '.join(str(error).split())}\n"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["walk"], "pagedkv: no such command 'walk'"),
        (["walkthrough", "--fast"], "pagedkv: no such option: --fast"),
        (["walkthrough", "more"], "pagedkv: got unexpected extra argument"),
        (["fails", "--count", "0"], "pagedkv: invalid value for '--count': "),
        (["fails", "--count", "1e3"], "pagedkv: invalid value for '--count': '1e3' is no"),
    ],
)
def test_a_wrong_command_line_is_one_line_that_says_where_help_is(
    arguments: list[str],
    expected: str,
    command: Callable[[BaseException], list[str]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    command(InvalidInput("not reached"))
    assert main.run(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(expected)
    assert err.rstrip("\n").endswith("--help")
    assert err.count("\n") == 1
    assert "Input should" not in err and "parse" not in err  # as Typer's checker has it


def test_an_error_that_nobody_expected_keeps_its_traceback(
    command: Callable[[BaseException], list[str]],
) -> None:
    with pytest.raises(ZeroDivisionError):
        main.run(command(ZeroDivisionError()))


def test_an_interruption_is_no_traceback(
    command: Callable[[BaseException], list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(command(KeyboardInterrupt())) == 130
    assert capsys.readouterr().err.strip() == ""


def test_an_interruption_that_python_can_only_print_is_taken_up_again(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_: Sequence[str]) -> int:
        class Kept:
            pass

        kept = Kept()
        watched = weakref.ref(kept, lambda _: signal.raise_signal(signal.SIGINT))
        del kept
        assert watched() is None
        time.sleep(60)
        return 0

    monkeypatch.setattr(main, "_run", interrupted)
    monkeypatch.setattr(sys, "unraisablehook", sys.__unraisablehook__)
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == 130
    assert capfd.readouterr().err.strip() == ""


def test_what_else_python_can_only_print_is_printed(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    class Fails:
        def __del__(self) -> None:
            raise ValueError("not so")

    monkeypatch.setattr(sys, "unraisablehook", main._interrupt_again)
    Fails()
    assert "ValueError: not so" in capfd.readouterr().err


def test_a_command_gives_its_own_exit_status(
    command: Callable[[BaseException], list[str]],
) -> None:
    assert main.run(command(typer.Exit(3))) == 3


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["--version"]) == 0
    assert capsys.readouterr().out == f"pagedkv {__version__}\n"


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_help_lists_the_commands(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(arguments) == 0
    assert "walkthrough" in capsys.readouterr().out


def test_the_list_of_commands_says_whole_sentences(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["--help"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    listed = " ".join(out.split())
    for name in ("simulate", "walkthrough", "generate", "serve"):
        summary = str(getattr(commands, name).__doc__).partition("\n\n")[0]
        assert f"{name} {summary.rstrip('.')}" in listed
    assert "..." not in out.partition("Commands:")[2]


def test_an_interruption_while_the_command_still_loads_is_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("raise KeyboardInterrupt\n")
    path = os.pathsep.join([str(tmp_path), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "pagedkv", "--version"],
        capture_output=True,
        env={**os.environ, "PYTHONPATH": path},
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "\n")


@pytest.mark.parametrize("arguments", [["walkthrough"], ["--version"]])
def test_a_reader_that_has_enough_gets_no_traceback(arguments: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "pagedkv", *arguments],
        stdout=writer,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": path},
        text=True,
        check=False,
    )
    os.close(writer)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "Broken pipe" not in done.stderr


def test_the_command_loads_what_a_subcommand_needs_only_for_that_one() -> None:
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", "import pagedkv.cli.commands, sys; print(*sys.modules)"],
        capture_output=True,
        env={**os.environ, "PYTHONPATH": path},
        text=True,
        check=True,
    )
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert not loaded & {"polars", "plotly", "torch", "transformers"}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
def test_a_full_disk_behind_standard_output_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "pagedkv", "--help"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert done.returncode == 2
    assert done.stderr == "pagedkv: standard output: No space left on device\n"
