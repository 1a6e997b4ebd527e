"""What the library calls a parameter is told by the name that it has on the command line."""

from __future__ import annotations

import pytest
import typer

from pagedkv.cli import commands
from pagedkv.cli.main import run
from pagedkv.cli.option_names import in_option_names
from pagedkv.errors import TraceError


def told(command: str, message: str) -> str:
    group = typer.main.get_command(commands.app)
    return in_option_names(message, group.commands[command].params)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("command", "message", "expected"),
    [
        ("serve", "max_num_seqs is 0: give 1", "--max-num-seqs is 0: give 1"),
        ("serve", "kv_memory and num_blocks both", "--kv-memory and --num-blocks both"),
        ("serve", "lower kv_memory, or num_tokens.", "lower --kv-memory, or --num-tokens."),
        ("serve", "kv_memory auto: no memory", "--kv-memory auto: no memory"),
        ("serve", "port is 7", "--port is 7"),
        ("generate", "temperature is -1", "--temperature is -1"),
        ("generate", "stop has an empty string", "--stop has an empty string"),
        ("generate", "n is 2 and temperature 0", "-n is 2 and temperature 0"),
        ("generate", "samples is 2", "--samples is 2"),
        ("simulate", "watermark is 1", "--watermark is 1"),
    ],
)
def test_parameters_are_called_as_options_are(command: str, message: str, expected: str) -> None:
    assert told(command, message) == expected


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("serve", "--max-num-seqs is 0"),
        ("serve", "other_max_num_seqs is 0, max_num_seqs_too"),
        ("serve", "/tmp/kv_memory is not there, nor kv_memory/x, kv_memory.gguf, a.kv_memory"),
        ("serve", "field 'num_blocks' is missing, \"num_tokens\" too"),
        ("serve", "kv_memory=3"),
        ("serve", "model type 'x' does not run"),
        ("serve", "the model is at the port and has a device"),
        ("serve", "temperature is -1"),
        ("walkthrough", "max_num_seqs is 0"),
    ],
)
def test_what_only_looks_like_a_parameter_stays(command: str, message: str) -> None:
    assert told(command, message) == message


def test_fields_of_a_trace_keep_their_names(capsys: pytest.CaptureFixture[str]) -> None:
    registered = list(commands.app.registered_commands)

    def fails(block_size: int = 1) -> None:
        raise TraceError("no number", file="a.csv", line=3, field="x block_size")

    commands.app.command("fails", cls=commands.Command)(fails)
    try:
        assert run(["fails"]) == 2
    finally:
        commands.app.registered_commands[:] = registered
    assert capsys.readouterr().err == "pagedkv: a.csv, line 3, field 'x block_size': no number\n"
