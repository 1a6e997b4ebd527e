"""`pagedkv serve` as a process: it starts, drains, records, and says in one line what is wrong."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pagedkv.cli import extras
from pagedkv.cli import serve as command
from pagedkv.cli.main import run

_NEEDED = ("torch", "transformers", "fastapi", "uvicorn", "prometheus_client", "openai")
MISSING = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
needs_server = pytest.mark.skipif(bool(MISSING), reason=f"needs {' and '.join(MISSING)}")


def error_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run(["serve", *arguments]) == 2
    return capsys.readouterr().err.splitlines()[-1]


def test_help_needs_no_server(capsys: pytest.CaptureFixture[str]) -> None:
    code = (
        "import sys; from pagedkv.cli.main import run; run(['serve', '--help']); "
        "assert not {'torch', 'fastapi', 'uvicorn', 'numba'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    for option in ("--host", "--api-key", "--drain-seconds", "--record", "--max-waiting"):
        assert option in done.stdout


@pytest.mark.parametrize("key", [" ", "a ", "\ta"])
def test_a_key_that_no_client_can_show_is_refused(
    capsys: pytest.CaptureFixture[str], key: str
) -> None:
    assert "no client can show" in error_of(capsys, "--model", "x", "--api-key", key)


@pytest.mark.parametrize("value", ["", " "])
def test_an_empty_variable_is_no_reason_to_serve_everybody(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], value: str
) -> None:
    monkeypatch.setenv("PAGEDKV_API_KEY", value)
    assert "PAGEDKV_API_KEY is empty" in error_of(capsys, "--model", "x")


def test_without_a_model_or_the_extra_one_line_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "no model: give --model" in error_of(capsys)
    monkeypatch.setattr(command, "require_engine", lambda: None)
    monkeypatch.setattr(extras, "_SERVER", ("fastapi_of_the_future",))
    assert "--api-key is empty" in error_of(capsys, "--model", "x", "--api-key", "")
    line = error_of(capsys, "--model", "x")
    assert line == "pagedkv: serving needs fastapi_of_the_future: install pagedkv[server]"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if MISSING:
        pytest.skip(f"needs {' and '.join(MISSING)}")
    from models.tiny_models import tiny_model, tiny_tokenizer

    folder = tmp_path_factory.mktemp("model")
    tiny_model("llama").save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@contextmanager
def served(
    folder: Path, *arguments: str, stdout: Any = None
) -> Iterator[tuple[subprocess.Popen[str], Any]]:
    """The command as a process, and OpenAI's client for it."""
    from openai import OpenAI

    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "pagedkv", "serve", "--model", str(folder), "--port", "0"),
            *("--served-model-name", "tiny", "--num-tokens", "2048"),
            *arguments,
        ],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stderr is not None
    try:
        told = []
        for line in process.stderr:
            told.append(line)
            if line.startswith("serving tiny at "):
                url = line.split()[-1]
                break
        else:
            raise AssertionError("".join(told))
        stages = ("starting", "loading", "reading the weights", "laying the weights", "KV memory")
        assert [stage for line in told for stage in stages if line.startswith(stage)] == [*stages]
        with OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=60) as client:
            yield process, client
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(30)
        process.stderr.close()


@needs_server
def test_a_signal_ends_it_when_what_runs_is_finished(folder: Path) -> None:
    with served(folder, "--drain-seconds", "60") as (process, client):
        stream = client.completions.create(
            model="tiny",
            prompt="Hello",
            max_tokens=100,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        next(iter(stream))
        process.send_signal(signal.SIGTERM)
        assert list(stream)[-1].choices[0].finish_reason == "length"
        assert process.wait(30) == 0
        assert process.stderr is not None
        assert process.stderr.read() == (
            "draining: answers under way have 60 s to end; another signal ends them now\n"
        )


@needs_server
def test_there_is_a_line_for_each_request_where_it_is_asked_for(
    folder: Path, tmp_path: Path
) -> None:
    file = tmp_path / "access.log"
    options = ("--access-log", "--allow-origin", "https://page.example")
    with file.open("wb") as out, served(folder, *options, stdout=out) as (process, client):
        told = client.completions.with_raw_response.create(
            model="tiny",
            prompt="Hello",
            max_tokens=3,
            extra_headers={"Origin": "https://page.example"},
        )
        assert told.headers["access-control-allow-origin"] == "https://page.example"
        answer = told.parse()
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        assert process.stderr is not None and process.stderr.read() == ""
    [line] = file.read_text(encoding="utf-8").splitlines()
    assert f" id={answer.id} method=POST path=/v1/completions status=200 " in line
    assert " tokens_in=5 tokens_out=3 duration_s=" in line and "Hello" not in line


@needs_server
def test_a_recording_reads_after_the_process_was_killed_under_load(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from pagedkv.simulate.trace_formats import read_trace

    file = tmp_path / "run.jsonl.zst"
    with served(folder, "--record", str(file)) as (process, client):
        for i in range(5):
            client.completions.create(model="tiny", prompt=f"Hello {i}", max_tokens=3)
        streams = [
            client.completions.create(
                model="tiny",
                prompt=f"Hi {i}",
                max_tokens=500,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            for i in range(4)
        ]
        for stream in streams:
            next(iter(stream))
        for _ in range(3_000):  # until a line of progress has told of all of them
            if len(read_trace(str(file))) == 9:
                break
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait(30)
        for stream in streams:
            stream.close()
    trace = read_trace(str(file))
    assert len(trace) == 9
    assert trace.output_tokens[:5].tolist() == [3] * 5 and trace.output_tokens[5:].min() > 0
    [remark] = [text for text in trace.remarks if "the run was cut off" in text]
    assert "when 4 requests were under way" in remark
    assert b"Hello" not in file.read_bytes()

    assert run(["simulate", str(file), "--by-step", "--no-report", "--json", "-"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert remark in told["remarks"] and told["schemes"][0]["finished"] == 5


@needs_server
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-streams", "0"], "--max-streams is 0: give at least 1"),
        (["--allow-origin", "example.org"], "--allow-origin is 'example.org': give it as browsers"),
        (["--num-blocks", "4", "--kv-memory", "1GiB"], "--kv-memory and --num-blocks both"),
        (["--host", "256.1.1.1", "--num-blocks", "4"], "--host is '256.1.1.1': "),
        (["--max-num-seqs", "0"], "--max-num-seqs is 0: give at least 1"),
        (
            ["--max-num-seqs", "9", "--max-num-batched-tokens", "8"],
            "--max-num-batched-tokens is 8: give at least --max-num-seqs, 9, ",
        ),
        (["--block-size", "0"], "--block-size is 0: give at least 1"),
        (["--max-model-len", "0", "--num-blocks", "4"], "--max-model-len is 0: give at least 1"),
        (["--device", "tpu"], "unknown device 'tpu': choose from auto, cpu, "),
    ],
)
def test_bad_settings_are_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert message in error_of(capsys, "--model", str(folder), *arguments)


@needs_server
def test_a_port_that_is_taken_is_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        line = error_of(capsys, "--model", str(folder), "--num-blocks", "4", "--port", port)
    assert f"127.0.0.1:{port}" in line
