"""The parts of benchmarks/gpu.py keep what they found, whatever fails or is left out after it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the extra [engine]")
pytest.importorskip("transformers", reason="needs the extra [engine]")
pytest.importorskip("triton", reason="triton is not installed")

import torch

OURS = {"tokens": 9, "tokens_per_s": 6.0, "forward_share": 0.9, "told": []}
THEIRS = {"tokens_per_s": 2.0, "is_whole": True, "answers": 5}


@dataclass(frozen=True)
class Settings:
    left_s: float
    device: str = "cpu"
    smoke: bool = True
    tune: bool = False

    def seconds_left(self) -> float:
        return self.left_s

    def keep(self, found: dict[str, Any]) -> None:
        json.dumps(found)


@pytest.fixture
def halves(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import gpu_engine
    import gpu_kernels

    shape = gpu_engine.shapes(Settings(0))["tiny"]
    monkeypatch.setattr(gpu_engine, "shapes", lambda _: {"Qwen3-0.6B": shape, "Qwen3-8B": shape})
    monkeypatch.setattr(gpu_engine, "random_model", lambda *_: None)
    monkeypatch.setattr(gpu_engine, "peer_rate", lambda *_: dict(THEIRS))
    monkeypatch.setattr(gpu_engine, "our_rate", lambda *_: dict(OURS))
    return gpu_engine, gpu_kernels


def test_a_model_that_fails_keeps_what_was_found_and_the_next_is_measured(
    halves: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(halves[0], "decode_rate", full)
    result = halves[0].measure(Settings(200))
    for name in ("Qwen3-0.6B", "Qwen3-8B"):
        assert result[name]["times_generate_batch"] == 3
        assert result[name]["failed"] == "OutOfMemoryError: CUDA out of memory"
        assert name in result["failed"]


def test_a_large_model_is_not_begun_with_little_time_left(
    halves: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        halves[0],
        "decode_rate",
        lambda *_: dict.fromkeys(
            ("batch", "context", "step_ms", "reading_once_ms", "share_of_reading_once"), 1
        ),
    )
    result = halves[0].measure(Settings(74))
    assert "failed" not in result and result["Qwen3-0.6B"]["decode"]["batch"] == 1
    assert result["Qwen3-8B"] == {"not_run": "74 s were left"}


def test_nothing_is_measured_beside_a_peer_that_does_not_stop(
    halves: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = threading.Event()
    monkeypatch.setattr(halves[0], "peer_rate", lambda *_: {"ended": end.wait()})
    monkeypatch.setattr(halves[0], "STOPPING_S", 0.0)
    monkeypatch.setattr(halves[0], "RESERVED_S", {"Qwen3-0.6B": 200.0})
    result = halves[0].measure(Settings(200))
    end.set()
    assert "did not end" in result["Qwen3-0.6B"]["failed"] and "failed" in result
    assert result["Qwen3-8B"] == {"not_run": "a peer does not stop"}


def test_a_peer_whose_answers_fail_has_no_rate(
    halves: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = halves[0]
    monkeypatch.undo()
    monkeypatch.setattr(engine, "LEAST_S", 0.0)
    ended = [(3, None), (2, None), (0, "out of memory")]
    answers = iter(
        SimpleNamespace(
            request_id=f"r{i}", generated_tokens=[0] * n, error=error, is_finished=lambda: True
        )
        for i, (n, error) in enumerate(ended)
    )
    manager = SimpleNamespace(
        add_request=lambda *_, **__: None,
        get_result=lambda **_: next(answers),
        stop=lambda **_: None,
    )
    tried: list[Any] = []

    @contextmanager
    def make(
        config: Any, *, continuous_batching_config: Any = None, **_: Any
    ) -> Iterator[SimpleNamespace]:
        tried.append(continuous_batching_config)
        if continuous_batching_config is None:
            raise OSError("no network to take flash attention from")
        yield manager

    model = SimpleNamespace(
        continuous_batching_context_manager=make,
        config=SimpleNamespace(_attn_implementation="sdpa"),
    )
    requests = [([1], 3), ([1], 2), ([1], 4)]
    found = engine.peer_rate(model, requests, 60.0)
    assert found["failed"] == "out of memory" and found["answers"] == 3
    assert "tokens_per_s" not in found and found["attention"] == "sdpa"
    assert "no network" in found["without_flash"]
    assert len(tried) == 2 and tried[1].auto_switch_to_flash is False


def test_a_check_without_time_is_neither_right_nor_wrong(halves: Any) -> None:
    result = halves[1].check(Settings(0))
    assert {case["right"] for case in result["correctness"]} == {None}
    assert "graph" in result["correctness"][0]["case"] and "failed" not in result


def test_on_a_device_that_does_not_work_any_more_nothing_else_is_checked(
    halves: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = halves[1]
    monkeypatch.setattr(kernels, "replayed", lambda _: 1.0)
    monkeypatch.setattr(kernels, "far_error", broken)
    monkeypatch.setattr(kernels, "still_works", lambda _: False)
    first, second, *others = kernels.check(Settings(200))["correctness"]
    assert (first["right"], second["right"]) == (False, False)
    assert {(case["right"], case["error"]) for case in others} == {
        (None, "not run: the device does not work any more")
    }


def test_what_was_measured_before_a_failure_is_kept(
    halves: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = halves[1]
    monkeypatch.setattr(
        kernels, "device_rates", lambda _: {"copy_gb_per_s": 1.0, "matrix_tflops": 1.0}
    )

    def half(settings: Any, rate: float, keep: Any) -> Any:
        keep([{"case": "first"}])
        raise RuntimeError("no flash")

    monkeypatch.setattr(kernels, "decode", lambda *_: [])
    monkeypatch.setattr(kernels, "prefill", half)
    monkeypatch.setattr(kernels, "host_time", lambda *_: {})
    result = kernels.measure(Settings(0))
    assert result["failed"] == "prefill" and result["decode"] == []
    assert result["prefill"] == {"failed": "RuntimeError('no flash')", "found": [{"case": "first"}]}


def test_a_part_that_dies_leaves_what_it_found_and_the_others_their_turn(
    halves: Any, tmp_path: Path
) -> None:
    import gpu

    code = "import os\ndef go(s):\n s.keep({'first': 1})\n os.abort()\n"
    (tmp_path / "dying.py").write_text(code, encoding="utf-8")
    (tmp_path / "fine.py").write_text("def go(s):\n return {'first': 2}\n", encoding="utf-8")
    script = tmp_path / "benchmarks" / "gpu.py"
    script.parent.mkdir()
    (tmp_path / "src").symlink_to(Path(gpu.__file__).parents[1] / "src")
    text = Path(gpu.__file__).read_text(encoding="utf-8")
    parts = "PARTS = {name: Part(name, 'go', 60.0) for name in ('dying', 'fine')}\nENDING_S"
    script.write_text(text.replace("ENDING_S", parts, 1), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, script, "--smoke", "--out", tmp_path / "out"],
        env={**os.environ, "PYTHONPATH": str(tmp_path), "TRITON_INTERPRET": "1"},
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and "dying: died of signal" in done.stdout, done.stderr
    found = {}
    for path in (tmp_path / "out").iterdir():
        found |= json.loads(path.read_text(encoding="utf-8"))
    assert found["dying"] == {"first": 1, "unfinished": True}
    assert found["fine"]["first"] == 2 and "unfinished" not in found["fine"]


def test_a_part_that_goes_on_is_ended(
    halves: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import gpu

    def goes_on(command: list[Any], *, timeout: float, check: bool) -> None:
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", goes_on)
    arguments = SimpleNamespace(out=Path(), smoke=True, tune=False)
    assert not gpu.began_and_ended("engine", arguments)
    assert "engine: ended after 225 s" in capsys.readouterr().out
    assert sum(part.seconds + gpu.ENDING_S for part in gpu.PARTS.values()) <= 8 * 60


def broken(*_: Any) -> Any:
    raise RuntimeError("an illegal memory access was encountered")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a device is here")
def test_without_a_device_one_line_says_so(halves: Any, tmp_path: Path) -> None:
    import gpu

    done = subprocess.run(
        [sys.executable, gpu.__file__, "--out", tmp_path / "out"],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and done.stderr == ""
    [line] = done.stdout.splitlines()
    assert "no CUDA device" in line and "--smoke" in line
    assert not (tmp_path / "out").exists()
