"""What a command says while it works names options as they are typed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pagedkv.cli.announcing import say, speaking_for


def test_options_are_named_as_they_are_typed_where_a_command_runs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    option = SimpleNamespace(param_type_name="option", name="kv_memory", opts=["--kv-memory"])
    with speaking_for([option]):
        say("give kv_memory a size")
    say("give kv_memory a size")
    told = capsys.readouterr()
    assert told.err == "give --kv-memory a size\ngive kv_memory a size\n" and told.out == ""
