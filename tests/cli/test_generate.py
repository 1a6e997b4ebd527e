from __future__ import annotations

import importlib.util
import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pagedkv.cli import extras
from pagedkv.cli.main import run

HAS_ENGINE = all(importlib.util.find_spec(name) for name in ("torch", "transformers"))


def error_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run(["generate", *arguments]) == 2
    return capsys.readouterr().err.splitlines()[-1]


def test_help_needs_neither_torch_nor_a_second(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", "--help"]) == 0
    assert "--kv-memory" in capsys.readouterr().out
    code = (
        "import sys; from pagedkv.cli.main import run; run(['--help']); "
        "assert not {'torch', 'transformers', 'numba'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_without_the_extra_one_line_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extras, "_ENGINE", ("torch_of_the_future",))
    line = error_of(capsys, "--model", "x", "Hello")
    assert line == ("pagedkv: running models needs torch_of_the_future: install pagedkv[engine]")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["Hello"], "no model: give --model"),
        (["--model", "x"], "no prompt"),
        (["--model", "x", "--prompts-file", "/nowhere"], "--prompts-file: /nowhere: No such file"),
    ],
)
def test_what_is_missing_is_told_before_anything_is_loaded(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert message in error_of(capsys, *arguments)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not HAS_ENGINE:
        pytest.skip("needs the extra [engine]")
    from models.tiny_models import tiny_model, tiny_tokenizer

    folder = tmp_path_factory.mktemp("model")
    tiny_model("llama").save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def test_answers_stand_in_the_order_of_their_prompts(
    folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("second\n\nthird\n")
    common = ["--model", str(folder), "--max-tokens", "5", "--num-blocks", "20"]
    assert run(["generate", *common, "first", "--prompts-file", str(file)]) == 0
    told = capsys.readouterr()
    titles = [line for line in told.out.splitlines() if line.startswith("── ")]
    assert titles == ["── first", "── second", "── third"]
    assert "20 blocks of 16 tokens" in told.err and "15 tokens in" in told.err
    assert "prefix hits" in told.err and "waste" in told.err

    assert run(["generate", *common, "--quiet", "first"]) == 0
    alone = capsys.readouterr()
    assert alone.err == "" and alone.out.strip() and "──" not in alone.out
    assert told.out.startswith("── first\n" + alone.out)


def test_beams_are_printed_best_first(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["--model", str(folder), "--max-tokens", "5", "--num-blocks", "40", "--beams", "3"]
    assert run(["generate", *common, "first"]) == 0
    alone = capsys.readouterr()
    assert alone.out.strip() and "──" not in alone.out
    assert run(["generate", *common, "-n", "2", "first", "second"]) == 0
    both = capsys.readouterr().out
    titles = [line for line in both.splitlines() if line.startswith("── ")]
    assert [title.split(" (score ")[0] for title in titles] == ["── first"] * 2 + ["── second"] * 2
    scores = [float(title.split(" (score ")[1][:-1]) for title in titles]
    assert scores[0] >= scores[1] and scores[2] >= scores[3]
    assert both.split("\n", 1)[1].startswith(alone.out)


@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        (["--json-schema", '{"enum": [1, true]}'], r"1|true"),
        (["--json-schema", "FILE"], r'\{\s*"a"\s*:\s*(1|true)\s*}'),
        (["--regex", "[a-c]{4}"], "[a-c]{4}"),
        (["--choice", "yes", "--choice", "no"], "yes|no"),
    ],
)
def test_answers_are_what_they_must_be(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    options: list[str],
    pattern: str,
) -> None:
    pytest.importorskip("llguidance", reason="needs the extra [structured]")
    file = tmp_path / "schema.json"
    file.write_text(
        '{"type": "object", "properties": {"a": {"enum": [1, true]}}, "required": ["a"]'
        ', "additionalProperties": false}'
    )
    given = [str(file) if option == "FILE" else option for option in options]
    common = ["generate", "--model", str(folder), "--num-blocks", "40", "--quiet"]
    assert run([*common, *given, "Hello"]) == 0
    assert re.fullmatch(pattern, capsys.readouterr().out.strip())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--regex", "a", "--choice", "b"], "--regex and --choice exclude each other"),
        (["--regex", "a", "--beams", "2"], "--beams and --regex exclude each other"),
        (["--json-schema", "/nowhere"], "--json-schema: /nowhere: No such file"),
        (["--json-schema", " "], "--json-schema: it is empty: give a file, or the schema itself"),
        (["--json-schema", "{"], "--json-schema: json is no JSON schema"),
        (["--regex", "["], "regex cannot be followed: unclosed character class"),
        (["--json-schema", '{"type": "x"}'], "json cannot be followed: Invalid type: x"),
    ],
)
def test_what_no_answer_can_be_is_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    pytest.importorskip("llguidance", reason="needs the extra [structured]")
    assert message in error_of(capsys, "--model", str(folder), *options, "Hello")


def test_without_the_extra_for_structures_one_line_says_what_to_install(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extras, "_STRUCTURED", ("guidance_of_the_future",))
    line = error_of(capsys, "--model", str(folder), "--regex", "a", "Hello")
    assert line.endswith("needs guidance_of_the_future: install pagedkv[structured]")


def test_a_long_prompt_is_cut_to_one_line_where_it_is_a_title(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    common = ["--model", str(folder), "--max-tokens", "2", "--num-blocks", "40", "--quiet"]
    assert run(["generate", *common, "one\nline", "many words " * 9]) == 0
    titles = [line for line in capsys.readouterr().out.splitlines() if line.startswith("── ")]
    assert titles == ["── one line", "── many words many words many…"]
    assert len(titles[1]) == 30


def in_a_process(folder: Path, prompts: Path, *more: str) -> subprocess.Popen[bytes]:
    """`pagedkv generate`, one prompt after the other, for longer than a test may take."""
    prompts.write_text("".join(f"prompt {i}\n" for i in range(2000)))
    arguments = ["--model", folder, "--prompts-file", prompts, "--max-tokens", "400"]
    sizes = ["--num-blocks", "40", "--max-num-seqs", "1", "--quiet"]
    return subprocess.Popen(
        [sys.executable, "-m", "pagedkv", "generate", *arguments, *sizes, *more],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # A suite that runs in the background may ignore the signal, and its children with it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def complaints(err: bytes) -> bytes:
    """What a process said on standard error, but for that it had to compile, if it had to."""
    lines = [line for line in err.splitlines() if not line.startswith(b"pagedkv: compiling")]
    return b"\n".join(lines).strip()


def test_ctrl_c_in_the_middle_of_an_answer_keeps_what_was_said_and_is_status_130(
    folder: Path, tmp_path: Path
) -> None:
    record = ["--record", str(tmp_path / "run.jsonl")]
    with in_a_process(folder, tmp_path / "prompts", *record) as process:
        assert process.stdout is not None
        title = process.stdout.readline()
        first = process.stdout.read(1)  # a character of the answer that is being written
        process.send_signal(signal.SIGINT)
        rest, err = process.communicate()
    assert process.returncode == 130
    assert title == "── prompt 0\n".encode()
    assert first and b"prompt 1999" not in rest
    assert complaints(err) == b""
    # All were cancelled, which is when their blocks came back, and the recording knows of it.
    lines = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    ended = [line for line in lines if "prompt_tokens" in line]
    assert {line["request"] for line in ended} == set(range(2000))
    assert sum("cancelled_step" in line for line in ended) > 1000


def test_a_reader_that_has_enough_ends_it_quietly(folder: Path, tmp_path: Path) -> None:
    with in_a_process(folder, tmp_path / "prompts") as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "── prompt 0\n".encode()
        process.stdout.close()
        assert complaints(process.stderr.read()) == b""
    assert process.returncode == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--beams", "3", "--temperature", "1"], "--beams and --temperature exclude each other"),
        (["--beams", "3", "--stop", "a"], "--beams and --stop exclude each other"),
        (["--beams", "3", "--record", "r.jsonl"], "--beams and --record exclude each other"),
        (["--beams", "3", "--seed", "0"], "--beams and --seed exclude each other"),
        (["--beams", "0"], "--beams is 0: give at least 1"),
        (["--beams", "2", "-n", "3"], "-n is 3: --beams 2 finds 1 to 2 answers"),
        (["--length-penalty", "2"], "--length-penalty is for beams"),
        (["--temperature", "-1"], "--temperature is -1"),
        (["-n", "0"], "-n is 0: give at least 1"),
        (["--seed", "-1"], "--seed is -1: give 0 to "),
        (["--kv-memory", "1MiB", "--num-blocks", "4"], "--kv-memory and --num-blocks both"),
        (["--dtype", "int3"], "unknown dtype"),
        (["--device", "tpu"], "unknown device 'tpu': choose from auto, cpu, cuda"),
        (["--device", "cuda:99"], "--device is cuda:99"),
        (["--system", "Be brief."], "--system is for chats"),
        (["--num-blocks", "1", "--max-tokens", "200"], "prompt 1 needs"),
        (["--max-model-len", "9999"], "right only up to 512"),
    ],
)
def test_bad_settings_are_one_line(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    assert message in error_of(capsys, "--model", str(folder), "Hello", *arguments)
