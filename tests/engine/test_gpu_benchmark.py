"""The halves of benchmarks/gpu.py keep what they found, whatever fails or is left out after it."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path
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


def test_a_check_without_time_is_neither_right_nor_wrong(
    halves: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = halves[1]
    monkeypatch.setattr(
        kernels, "device_rates", lambda _: {"copy_gb_per_s": 1.0, "matrix_tflops": 1.0}
    )

    def broken(*_: Any) -> Any:
        raise RuntimeError("no flash")

    monkeypatch.setattr(kernels, "decode", lambda *_: [])
    monkeypatch.setattr(kernels, "prefill", broken)
    monkeypatch.setattr(kernels, "host_time", lambda *_: {})
    result = kernels.measure(Settings(0))
    assert {case["right"] for case in result["correctness"]} == {None}
    assert "graph" in result["correctness"][0]["case"]
    assert result["failed"] == "prefill" and result["decode"] == []
