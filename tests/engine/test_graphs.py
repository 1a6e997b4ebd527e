"""Steps that are replayed on fixed buffers say what steps say that are computed anew.

What captures here keeps the computation itself and does it again on the same buffers, as a graph
does: whatever stands wrong in them, or is still there from the last batch, is computed with.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the extra [engine]")
pytest.importorskip("transformers", reason="needs the extra [engine]")
pytest.importorskip("triton", reason="triton is not installed")

import torch

from models.gpu_batch import DEVICE
from models.tiny_engine import TinyEngine, greedy, tokens_of
from models.tiny_models import VOCABULARY, tiny_model
from pagedkv.engine import device_sampling
from pagedkv.engine.graphs import CUDACapture, ladder
from pagedkv.engine.model import PagedModel
from pagedkv.engine.sampling_params import SamplingParams


def again(compute: Callable[[], None]) -> Callable[[], None]:
    """Captures as a graph does, and runs it once first."""
    compute()
    return compute


def capture() -> Any:
    return again if DEVICE == "cpu" else CUDACapture(torch.device(DEVICE, 0))


@cache
def model(triton: bool = True) -> PagedModel:
    made = tiny_model("llama", num_hidden_layers=1)
    return PagedModel(made.to(DEVICE), triton=True) if triton else PagedModel(made)


def engine(num_blocks: int = 40, *, graphs: bool = True, **options: Any) -> TinyEngine:
    options = {"seats": 4, "ahead": True, **options}
    return TinyEngine(model(), num_blocks, capture=capture() if graphs else None, **options)


def prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(3, VOCABULARY), k=length)


@cache
def says(seed: int, length: int, count: int) -> list[int]:
    return TinyEngine(model(triton=False), 40).answers([prompt(seed, length)], greedy(count))[0]


def test_the_ladder_has_small_sizes_and_the_largest() -> None:
    assert ladder(1) == [1]
    assert ladder(2) == [1, 2]
    assert ladder(8) == [1, 2, 4, 8]
    assert ladder(256)[:7] == [1, 2, 4, 8, 16, 24, 32] and ladder(256)[-2:] == [248, 256]


@pytest.mark.parametrize("ahead", [False, True])
def test_decodes_are_replayed_and_say_the_same(ahead: bool) -> None:
    running = engine(ahead=ahead)
    lengths = [5, 9, 2]
    requests = [running.add(prompt(i, n), greedy(4 + i)) for i, n in enumerate(lengths)]
    running.finish_all()
    assert running.graphs is not None and running.graphs.num_replays >= 5
    for i, (n, request) in enumerate(zip(lengths, requests, strict=True)):
        assert tokens_of(request) == says(i, n, 4 + i)


def test_padding_writes_nowhere() -> None:
    running = engine()
    request = running.add(prompt(1, 6), greedy(4))
    others = running.add(prompt(2, 6), greedy(9)), running.add(prompt(3, 6), greedy(9))
    before = running.storage.data.clone()
    running.finish_all()  # three in the graph for four
    touched = (running.storage.data.nan_to_num(7.5) != before.nan_to_num(7.5)).any(1)
    assert touched.sum() <= 3 + 4 + 4
    assert tokens_of(request) == says(1, 6, 4)
    assert [tokens_of(r) for r in others] == [says(2, 6, 9), says(3, 6, 9)]


@pytest.mark.parametrize("ahead", [False, True])
def test_whoever_leaves_or_gives_way_between_two_replays_leaves_nothing_behind(
    ahead: bool,
) -> None:
    running = engine(8, ahead=ahead, budget=20)
    first, doomed = running.add(prompt(1, 9), greedy(9)), running.add(prompt(2, 9), greedy(9))
    for _ in range(3):
        running.step()
    running.cancel(doomed)
    later = [running.add(prompt(i, 9), greedy(9)) for i in (3, 4)]
    running.finish_all()
    assert running.scheduler.statistics().preemptions > 0
    assert tokens_of(first) == says(1, 9, 9)
    assert [tokens_of(r) for r in later] == [says(3, 9, 9), says(4, 9, 9)]


def test_a_batch_above_the_largest_graph_is_computed_without() -> None:
    running = engine(seats=6)
    assert running.graphs is not None
    running.graphs.sizes = [1, 2]
    requests = [running.add(prompt(i, 5), greedy(3)) for i in range(3)]
    running.finish_all()
    assert running.graphs.num_replays == 0
    running.add(prompt(5, 5), greedy(3))
    running.finish_all()
    assert running.graphs.num_replays > 0
    assert [tokens_of(r) for r in requests] == [says(i, 5, 3) for i in range(3)]


def test_tables_that_a_graph_has_no_room_for_are_read_without() -> None:
    running = engine()
    assert running.graphs is not None
    for graph in running.graphs._graphs.values():
        graph._most_blocks = 2
    request = running.add(prompt(1, 5), greedy(7))
    running.finish_all()
    assert 0 < running.graphs.num_replays < 6
    assert tokens_of(request) == says(1, 5, 7)


def test_samples_that_fork_and_draw_are_replayed_too() -> None:
    params = SamplingParams(n=3, temperature=0.9, seed=3, max_tokens=5, logprobs=1)
    found = []
    for graphs in (False, True):
        running = engine(graphs=graphs)
        request = running.add(prompt(1, 6), params)
        running.finish_all()
        found.append([c.token_ids for c in request.generation().completions])
    assert found[0] == found[1] and len(set(found[0])) == 3


def test_what_is_said_of_a_prompt_is_read_before_it_is_overwritten() -> None:
    found = []
    for graphs in (False, True):
        running = engine(graphs=graphs, seats=1, budget=1)  # chunks of one token
        request = running.add(prompt(1, 6), greedy(3, prompt_logprobs=0))
        running.finish_all()
        found.append([entry and entry.logprob for entry in request.prompt_logprobs or ()])
    assert found[0][1:] == pytest.approx(found[1][1:], abs=1e-5)


def test_a_model_that_cannot_be_captured_runs_without_graphs_and_says_why() -> None:
    def refuse(compute: Callable[[], None]) -> Callable[[], None]:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    running = TinyEngine(model(), 40, capture=refuse)
    assert running.graphs is None
    assert running.graph_problem == (
        "decode steps of llama cannot be captured as graphs, and are computed without: "
        "operation not permitted when stream is capturing"
    )
    assert running.answers([prompt(1, 5)], greedy(3)) == [says(1, 5, 3)]


def test_logits_of_some_rows_are_those_rows() -> None:
    running = engine()
    assert running.graphs is not None
    running.add(prompt(1, 5), greedy(3))
    running.add(prompt(2, 5), greedy(3))
    running._ahead = False
    running.step()
    batch = running.scheduler.schedule()
    whole = running.graphs.logits(2, batch, np.arange(2), None).clone()
    part = running.graphs.logits(2, batch, np.array([1]), None)
    assert torch.equal(part, whole[1:])


def test_filling_the_buffers_does_not_count_as_the_forward() -> None:
    now_s = 0.0

    def later(seconds: float, work: Any) -> Any:
        def done(*arguments: Any) -> Any:
            nonlocal now_s
            now_s += seconds
            return work(*arguments)

        return done

    running = engine(ahead=False, clock=lambda: now_s)
    running.add(prompt(1, 5), greedy(3))
    running.step()
    assert running.graphs is not None
    graph = running.graphs._graphs[1]
    graph._plan.update = later(2.0, graph._plan.update)
    graph._replay = later(4.0, graph._replay)
    running.step()
    assert running.last_step is not None and running.last_step.total_s == 6.0
    if DEVICE == "cpu":
        assert running.last_step.forward_s == 4.0


class Device:
    """What `CUDACapture` asks of torch, without a device: as torch 2.13 does it."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.current: Any = Stream("own")
        self.mode = 0
        self.log: list[str] = []
        self.is_capturing = False
        self.num_streams = 0
        cuda = torch.cuda
        patch.setattr(cuda, "device", lambda device: nullcontext())
        patch.setattr(cuda, "graph_pool_handle", lambda: "pool")
        patch.setattr(cuda, "Stream", self.new_stream)
        patch.setattr(cuda, "CUDAGraph", lambda: SimpleNamespace(replay=self.work))
        patch.setattr(cuda, "current_stream", lambda: self.current)
        patch.setattr(cuda, "set_stream", self.set_stream)
        patch.setattr(cuda, "synchronize", lambda: None)
        patch.setattr(cuda, "stream", self.stream)
        patch.setattr(cuda, "graph", self.graph)
        patch.setattr(cuda, "get_sync_debug_mode", lambda: self.mode)
        patch.setattr(cuda, "set_sync_debug_mode", self.set_mode)

    def new_stream(self) -> Any:
        self.num_streams += 1
        return Stream("aside")

    def set_stream(self, stream: Any) -> None:
        self.current = stream

    def set_mode(self, mode: int | str) -> None:
        self.mode = 2 if mode == "error" else int(mode)

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def graph(
        self, graph: Any, *, pool: Any, stream: Any, capture_error_mode: str
    ) -> Iterator[None]:
        before, self.current = self.current, stream
        self.is_capturing = True
        try:
            yield
        except BaseException:
            raise RuntimeError("capture_end failed") from None  # and so does not go back
        finally:
            self.is_capturing = False
        self.current = before

    def work(self) -> None:
        """A step that waits for nothing."""
        self.log.append(f"{self.current.name} {self.mode} {self.is_capturing}")


class Stream:
    def __init__(self, name: str) -> None:
        self.name = name

    def wait_stream(self, other: Any) -> None:
        pass


def test_steps_are_run_before_they_are_captured_all_on_one_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = Device(monkeypatch)
    captures = CUDACapture(torch.device("cuda", 0))
    for _ in range(2):
        captures(device.work)
    each = ["aside 0 False", "aside 2 False", "aside 0 True"]
    assert device.log == each * 2
    assert (device.num_streams, device.current.name, device.mode) == (1, "own", 0)


def test_a_step_that_looks_at_its_own_numbers_is_found_before_it_is_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = Device(monkeypatch)

    def looks() -> None:
        device.work()
        if device.mode == 2:
            raise RuntimeError("called a synchronizing CUDA operation")

    with pytest.raises(RuntimeError, match="synchronizing"):
        CUDACapture(torch.device("cuda", 0))(looks)
    assert device.log == ["aside 0 False", "aside 2 False"]
    assert (device.current.name, device.mode) == ("own", 0)


def test_a_capture_that_fails_leaves_the_thread_on_its_own_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = Device(monkeypatch)

    def refuses() -> None:
        if device.is_capturing:
            raise RuntimeError("not permitted")

    with pytest.raises(RuntimeError, match="capture_end failed"):
        CUDACapture(torch.device("cuda", 0))(refuses)
    assert (device.current.name, device.mode) == ("own", 0)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.5, "seed": 3, "logprobs": 2},
        {"temperature": 0.9, "top_p": 0.9, "seed": 3, "frequency_penalty": 1.0},
        {"temperature": 0, "repetition_penalty": 1.5, "min_tokens": 3, "stop_token_ids": [4]},
    ],
)
def test_what_is_drawn_and_counted_is_the_same_from_a_graph(
    options: dict[str, Any], ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the host draws once more, by logits that the next replay has overwritten."""
    monkeypatch.setattr(device_sampling, "MARGIN", 0.05)
    monkeypatch.setattr(device_sampling, "FINE_MARGIN", 0.05)
    params = SamplingParams(max_tokens=7, **options)
    found = []
    for running in (TinyEngine(model(triton=False), 40), engine(ahead=ahead, budget=20)):
        requests = [running.add(prompt(i, 5 + i), params) for i in range(3)]
        running.finish_all()
        found.append([tokens_of(r) for r in requests])
    assert running.graphs is not None and running.graphs.num_replays >= 4
    assert found[0] == found[1]
