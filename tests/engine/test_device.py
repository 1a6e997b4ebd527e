from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the extra [engine]")
pytest.importorskip("transformers", reason="needs the extra [engine]")

import numpy as np
import torch

from models.tiny_models import tiny_model
from pagedkv.engine.device import check_dtype, parse_device, uploaded
from pagedkv.engine.llm import LLM
from pagedkv.engine.loading import moved
from pagedkv.engine.model import PagedModel
from pagedkv.errors import InvalidInput


class Cuda:
    """Stands in for what torch knows of CUDA devices."""

    def __init__(self, patch: pytest.MonkeyPatch, count: int, major: int = 9) -> None:
        patch.setattr(torch.cuda, "is_available", lambda: count > 0)
        patch.setattr(torch.cuda, "device_count", lambda: count)
        patch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
        patch.setattr(torch.cuda, "get_device_name", lambda device: "Old One")


def test_auto_is_a_cuda_device_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    Cuda(monkeypatch, 0)
    assert parse_device("auto") == torch.device("cpu")
    Cuda(monkeypatch, 2)
    assert parse_device("auto") == parse_device("cuda") == torch.device("cuda:0")
    assert parse_device("cuda:1") == torch.device("cuda:1")
    assert parse_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "count", "message"),
    [
        ("cuda", 0, "finds no CUDA device here: give cpu"),
        ("cuda:2", 2, "device is cuda:2: this machine has cuda:0 to cuda:1"),
        ("gpu", 2, "unknown device 'gpu': choose from auto, cpu, cuda"),
        ("cuda:x", 2, "unknown device"),
        ("CUDA", 2, "unknown device"),
    ],
)
def test_a_device_that_is_not_there_is_refused_in_one_line(
    name: str, count: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Cuda(monkeypatch, count)
    with pytest.raises(InvalidInput, match=message) as refusal:
        parse_device(name)
    assert "\n" not in str(refusal.value)


def test_a_dtype_that_the_device_does_not_compute_in_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Cuda(monkeypatch, 1, major=7)
    with pytest.raises(InvalidInput, match="Old One does not compute in bfloat16: give --dtype"):
        check_dtype(torch.device("cuda:0"), torch.bfloat16)
    check_dtype(torch.device("cuda:0"), torch.float16)
    check_dtype(torch.device("cpu"), torch.bfloat16)


def test_the_engine_refuses_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Cuda(monkeypatch, 0)
    with pytest.raises(InvalidInput, match="no CUDA device"):
        LLM(tmp_path / "not there", device="cuda")
    with pytest.raises(InvalidInput, match="no CUDA device"):
        LLM(tiny_model("llama"), device="cuda")


class Full:
    """A model that the device has no room for."""

    def __init__(self) -> None:
        self._weight = torch.zeros(1 << 20)

    def parameters(self) -> Any:
        return iter([self._weight])

    def to(self, device: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")


def test_weights_that_do_not_fit_are_refused_in_one_line() -> None:
    with pytest.raises(InvalidInput, match=r"need 4\.0 MiB, more than cuda:0 has free") as refusal:
        moved(Full(), torch.device("cuda:0"))
    assert "\n" not in str(refusal.value)


def test_memory_that_runs_out_while_the_engine_is_made_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")

    monkeypatch.setattr(PagedModel, "make_storage", full)
    with pytest.raises(InvalidInput, match="no memory left beside the weights") as refusal:
        LLM(tiny_model("llama"))
    assert "\n" not in str(refusal.value)


def test_arrays_arrive_as_they_were() -> None:
    arrays = [np.arange(5), np.empty((0, 2), np.int64), np.arange(6).reshape(2, 3)]
    found = uploaded(arrays, torch.device("cpu"))
    assert [t.tolist() for t in found] == [a.tolist() for a in arrays]
