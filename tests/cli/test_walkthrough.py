"""`pagedkv walkthrough` as it is seen: widths, colours, encodings, pauses, the page in docs/."""

from __future__ import annotations

import io
import os
import pty
import re
import select
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from rich.console import Console

from pagedkv.cli.walkthrough import show

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "walkthrough.md"
COMMAND = [sys.executable, "-m", "pagedkv", "walkthrough"]


def environment(**changes: str) -> dict[str, str]:
    unset = ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES", "PYTHONIOENCODING", "TTY_COMPATIBLE")
    kept = {name: value for name, value in os.environ.items() if name not in unset}
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    return {**kept, "PYTHONPATH": path, "PYTHONUTF8": "1", "TERM": "xterm-256color", **changes}


def piped(*options: str, **changes: str) -> str:
    done = subprocess.run(
        [*COMMAND, *options],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env=environment(**changes),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.decode()


def drawn(width: int, *, colour: bool = False, encoding: str = "utf-8") -> str:
    """The walkthrough on a terminal `width` columns wide."""
    written = io.BytesIO()
    stream = io.TextIOWrapper(written, encoding=encoding, newline="\n")
    system = "truecolor" if colour else None
    show(Console(file=stream, width=width, color_system=system, force_terminal=True))
    stream.flush()
    return written.getvalue().decode(encoding)


class Terminal:
    """The command on a terminal of 80 columns."""

    def __init__(self, *options: str, **changes: str) -> None:
        self.own, theirs = pty.openpty()
        self.process = subprocess.Popen(
            [*COMMAND, *options],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=environment(COLUMNS="80", **changes),
            start_new_session=True,
        )
        os.close(theirs)

    def read_until(self, words: str) -> str:
        """What appears up to `words`; all there is, if the command ends before."""
        seen = b""
        while words.encode() not in seen:
            # Minutes, since the command may have to compile first, on a busy machine.
            if not select.select([self.own], [], [], 300)[0]:
                raise TimeoutError(f"no {words!r} in {seen!r}")
            try:
                part = os.read(self.own, 4096)
            except OSError:  # Linux says so when the other end is closed
                break
            if not part:
                break
            seen += part
        return seen.decode()

    def press(self, key: str) -> None:
        # Going over to single keys, a program drops what was typed before: wait for that.
        while termios.tcgetattr(self.own)[3] & termios.ICANON:
            assert self.process.poll() is None
            time.sleep(0.01)
        os.write(self.own, key.encode())

    def exit_status(self) -> int:
        return self.process.wait(60)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.own)


@pytest.mark.parametrize("width", [40, 60, *range(66, 84), 100, *range(130, 136), 200])
@pytest.mark.parametrize("colour", [False, True])
def test_no_line_is_wider_than_the_terminal(width: int, colour: bool) -> None:
    for line in re.sub(r"\x1b\[[\d;]*m", "", drawn(width, colour=colour)).splitlines():
        assert len(line) <= width


def memories_beside_each_other(output: str) -> bool:
    return re.search(r"Paged +Contiguous", output) is not None


def test_the_two_memories_are_beside_each_other_from_80_columns_on() -> None:
    assert not memories_beside_each_other(drawn(60))
    assert memories_beside_each_other(drawn(80))
    assert memories_beside_each_other(drawn(160))


def test_blocks_are_coloured_on_a_terminal_and_bear_their_owner() -> None:
    assert re.search(r"\x1b\[[\d;]*48;2;[\d;]*m E \x1b\[0m", drawn(80, colour=True))


def test_what_is_said_is_the_same_with_and_without_colour() -> None:
    def numbers(output: str) -> list[str]:
        return re.findall(r"\d+", re.sub(r"\x1b\[[\d;]*m", "", output))

    assert numbers(drawn(80, colour=True)) == numbers(drawn(80))


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "latin-1"])
def test_an_encoding_without_these_characters_gets_ascii(encoding: str) -> None:
    output = drawn(80, encoding=encoding)
    assert output.isascii()
    assert "EEE" in output
    assert "!!!" in output  # the holes that E does not fit into
    assert "token 20, slot 36" in output


def test_a_pipe_gets_everything_at_once_and_no_control_characters() -> None:
    output = piped(COLUMNS="80")
    assert output.replace("\n", "").isprintable()
    assert "8 of 8" in output
    assert "Enter" not in output


def test_the_page_in_the_documentation_shows_the_real_output() -> None:
    shown = re.findall(r"^```text\n(.*?)^```$", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    assert shown == [drawn(80)], "print it anew: COLUMNS=80 pagedkv walkthrough | cat"


def test_a_terminal_waits_after_each_step_and_q_ends_it() -> None:
    with Terminal() as terminal:
        first = terminal.read_until("q to quit")
        assert "1 of 8" in first
        assert "2 of 8" not in first
        assert "\x1b[" in first
        terminal.press("\r")
        second = terminal.read_until("q to quit")
        assert "2 of 8" in second
        assert "3 of 8" not in second
        terminal.press("q")
        assert "3 of 8" not in terminal.read_until("3 of 8")
        assert terminal.exit_status() == 0


def test_ctrl_c_between_steps_ends_it_without_a_traceback() -> None:
    with Terminal() as terminal:
        terminal.read_until("q to quit")
        terminal.press("\x03")
        assert "Traceback" not in terminal.read_until("Traceback")
        assert terminal.exit_status() == 130


def test_a_terminal_that_is_told_not_to_wait_shows_it_all_without_colours() -> None:
    with Terminal("--no-pause", "--no-color") as terminal:
        output = terminal.read_until("pagedkv simulate")
        assert "8 of 8" in output
        assert "q to quit" not in output
        assert "\x1b" not in output
        assert terminal.exit_status() == 0


def test_no_color_in_the_environment_means_no_colour() -> None:
    with Terminal("--no-pause", NO_COLOR="1") as terminal:
        assert "\x1b" not in terminal.read_until("pagedkv simulate")
