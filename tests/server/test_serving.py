"""Under load, while draining, and when something breaks."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the extra [engine]")
pytest.importorskip("fastapi", reason="needs the extra [server]")
pytest.importorskip("prometheus_client", reason="needs the extra [server]")
pytest.importorskip("openai", reason="needs OpenAI's client")

import openai

from models.memory_messages import read_messages
from models.tiny_server import MODEL, TinyServer, tiny_server
from pagedkv.engine import SamplingParams
from pagedkv.engine.outputs import Chunk
from pagedkv.engine.request import Request
from pagedkv.errors import BrokenLaw, InvalidInput
from pagedkv.server.app import create_app
from pagedkv.server.errors import ApiError, BrokenOff
from pagedkv.server.exchange import ClientLeft, Exchange
from pagedkv.server.limits import ServerLimits
from pagedkv.server.metrics import AnswerTimes, Metrics

LONG: dict[str, Any] = {"model": MODEL, "max_tokens": 400, "extra_body": {"ignore_eos": True}}


def begin(server: TinyServer, prompt: Any = "Hello", **options: Any) -> Any:
    """A stream that has begun."""
    stream = server.client().completions.create(
        **{**LONG, **options, "prompt": prompt, "stream": True}
    )
    next(iter(stream))
    return stream


def test_past_the_queue_there_is_429_with_a_time_to_come_again() -> None:
    limits = ServerLimits(max_waiting=2)
    with tiny_server(limits=limits, max_num_seqs=1) as server:
        running = begin(server)
        threads = []
        for i in range(2):
            thread = threading.Thread(
                target=lambda i=i: server.client().completions.create(
                    model=MODEL, prompt=f"Waiting {i}", max_tokens=2
                )
            )
            thread.start()
            threads.append(thread)
        server.wait_until(lambda: server.llm.num_waiting == 2)
        page = server.http().get("/metrics").text
        assert "\npagedkv_requests_waiting 2.0\n" in page
        for stream in (True, False):
            with pytest.raises(openai.RateLimitError, match="2 sequences wait already") as refusal:
                server.client().completions.create(model=MODEL, prompt="Hi", stream=stream)
            assert 1 <= int(refusal.value.response.headers["retry-after"]) <= 60
            assert refusal.value.code == "queue_full"
        running.close()
        for thread in threads:
            thread.join(60)
        server.client().completions.create(model=MODEL, prompt="Hi", max_tokens=2)
        page = server.http().get("/metrics").text
        assert 'pagedkv_requests_refused_total{reason="queue_full"} 2.0' in page


def test_past_the_open_streams_there_is_429_and_others_are_served() -> None:
    with tiny_server(limits=ServerLimits(max_streams=1)) as server:
        running = begin(server)
        with pytest.raises(openai.RateLimitError, match="1 streams are open"):
            server.client().completions.create(model=MODEL, prompt="Hi", stream=True)
        server.client().completions.create(model=MODEL, prompt="Hi", max_tokens=2)
        running.close()
        server.wait_until(lambda: not server.serving.exchanges)
        begin(server).close()


class SlowReader:
    """A stream straight from the application, whose client takes a piece whenever it is told to."""

    def __init__(self, server: TinyServer, **options: Any) -> None:
        self.pieces: list[bytes] = []
        self._body = json.dumps({"ignore_eos": True, "stream": True, **options}).encode()
        self._scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "method": "POST",
            "scheme": "http",
            "path": "/v1/completions",
            "raw_path": b"/v1/completions",
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
            "http_version": "1.1",
        }
        self._loop = server.server._loop
        self._turn = asyncio.Event()
        self._app = create_app(server.serving)
        assert self._loop is not None
        self.done = asyncio.run_coroutine_threadsafe(self._run(), self._loop)

    async def _run(self) -> None:
        is_given = False

        async def receive() -> dict[str, Any]:
            nonlocal is_given
            if is_given:
                await asyncio.Event().wait()
            is_given = True
            return {"type": "http.request", "body": self._body, "more_body": False}

        async def send(message: Any) -> None:
            await self._turn.wait()
            self.pieces.append(message.get("body", b""))

        await self._app(self._scope, receive, send)

    def read_on(self) -> None:
        """Take all that is left."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._turn.set)
        self.done.result(60)


def test_a_stream_counts_until_its_client_has_read_it() -> None:
    with tiny_server(limits=ServerLimits(max_streams=1)) as server:
        reader = SlowReader(server, prompt="Hello", max_tokens=9)
        server.wait_until(lambda: server.llm.statistics().requests == 1)
        server.wait_until(lambda: not server.serving.exchanges)
        assert server.used_blocks == 0
        with pytest.raises(openai.RateLimitError, match="1 streams are open"):
            server.client().completions.create(model=MODEL, prompt="Hi", stream=True)
        reader.read_on()
        assert reader.pieces[-2:] == [b"data: [DONE]\n\n", b""]
        assert server.serving.num_streams == 0
        begin(server).close()


def test_a_stream_that_is_refused_by_the_engine_counts_no_longer() -> None:
    with tiny_server(num_tokens=64, limits=ServerLimits(max_streams=1)) as server:
        for _ in range(2):
            with pytest.raises(openai.BadRequestError, match="blocks"):
                server.client().completions.create(
                    model=MODEL, prompt=[5] * 90, max_tokens=2, stream=True
                )
        assert server.serving.num_streams == 0
        page = server.http().get("/metrics").text
        assert 'pagedkv_requests_refused_total{reason="context_length_exceeded"} 2.0' in page


def test_where_nobody_may_wait_whoever_need_not_is_served() -> None:
    with tiny_server(limits=ServerLimits(max_waiting=0)) as server:
        for _ in range(2):
            server.client().completions.create(model=MODEL, prompt="Hi", max_tokens=2)


def test_all_answers_that_a_client_left_are_counted_and_nothing_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with tiny_server() as server:
        begin(server, n=3).close()
        server.wait_until(lambda: not server.serving.is_busy and server.used_blocks == 0)
        page = server.http().get("/metrics").text
        assert 'pagedkv_requests_finished_total{reason="abort"} 3.0' in page
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_it_at_once(sig: int) -> None:
    with tiny_server() as server:
        running = begin(server)
        server.server.handle_exit(sig, None)
        server.wait_until(lambda: server.serving.is_draining)
        assert not server.server.should_exit
        server.server.handle_exit(sig, None)
        assert server.server.should_exit
        assert server.server.force_exit is (sig == signal.SIGINT)
        with contextlib.suppress(Exception):
            list(running)


class Told:
    """An exchange with an engine that a test plays, and what it told its owner."""

    def __init__(self, num_prompts: int = 1) -> None:
        self.ends = self.closes = 0
        self.exchange = Exchange(
            [[1, 2]] * num_prompts,
            SamplingParams(n=1),
            namespace=None,
            is_streamed=True,
            times=AnswerTimes(Metrics().requests, 0.0),
            on_end=self._end,
            on_close=self._close,
        )

    def _end(self, _: Exchange) -> None:
        self.ends += 1

    def _close(self, _: Exchange) -> None:
        self.closes += 1

    def say(self, finish: Any = None) -> None:
        self.exchange.put(0, Chunk(0, "x", (5,), None, finish), 1.0)
        self.exchange.wake()


def test_what_comes_after_the_end_changes_nothing() -> None:
    left = Told()
    left.say()
    left.exchange.break_off(ClientLeft())
    left.say("stop")
    left.exchange.break_off(ApiError(503, "too late"))
    left.exchange.close()
    assert (left.ends, left.closes, left.exchange.num_going_on) == (1, 1, 1)
    assert left.exchange.requests == [None]
    assert isinstance(left.exchange.reason, ClientLeft)
    done = Told()
    done.say("stop")
    done.exchange.close()
    assert (done.ends, done.closes, done.exchange.reason) == (1, 1, None)


def test_it_has_begun_with_the_last_prompt_and_ends_with_the_last_answer() -> None:
    async def run() -> None:
        told = Told(num_prompts=2)
        beginning = asyncio.create_task(told.exchange.accepted())
        for place in range(2):
            await asyncio.sleep(0)
            assert not beginning.done()
            request: Any = Request.__new__(Request)
            told.exchange.put(place, request, 1.0)
            told.exchange.wake()
            told.exchange.wake()  # before it has woken
        await asyncio.wait_for(beginning, 60)

    asyncio.run(run())
    told = Told(num_prompts=2)
    told.say("stop")
    assert told.ends == 0
    told.say("stop")
    assert told.ends == 1


def test_a_failure_is_told_in_its_first_line() -> None:
    for failure, line in (
        (RuntimeError("no power\nat all"), "failed: no power"),
        (KeyError(), "failed: KeyError"),
    ):
        told = Told()
        told.say("abort")
        assert told.ends == 0  # the failure follows
        told.exchange.put(0, failure, 1.0)
        assert isinstance(told.exchange.reason, ApiError) and told.ends == 1
        assert told.exchange.reason.status == 500 and told.exchange.num_going_on == 1
        assert told.exchange.reason.message.endswith(line)
        assert told.exchange.reason.code == "step_failed"
    told = Told()
    told.exchange.put(0, refusal := InvalidInput("too long"), 1.0)
    assert told.exchange.reason is refusal


def test_who_waits_is_told_of_news_silence_the_end_and_what_broke_it_off() -> None:
    async def run() -> None:
        told = Told()
        waiting = asyncio.create_task(told.exchange.chunks())
        await asyncio.sleep(0)
        told.exchange.remind()
        told.exchange.wake()  # of nothing
        await asyncio.sleep(0)
        assert not waiting.done()
        told.exchange.remind()
        assert await waiting == []
        told.say()
        told.exchange.remind()
        assert [chunk.text for _, chunk in await told.exchange.chunks() or ()] == ["x"]
        told.say()
        assert len(await told.exchange.chunks() or ()) == 1
        waiting = asyncio.create_task(told.exchange.chunks())
        await asyncio.sleep(0)
        told.exchange.remind()  # something was said since the last time
        await asyncio.sleep(0)
        assert not waiting.done()
        told.say("stop")
        assert len(await waiting or ()) == 1
        assert await told.exchange.chunks() is None
        broken = Told()
        waiting = asyncio.create_task(broken.exchange.chunks())
        await asyncio.sleep(0)
        broken.say()
        broken.exchange.break_off(ClientLeft())  # before it has woken: nobody wants the rest
        with pytest.raises(ClientLeft):
            await asyncio.wait_for(waiting, 60)

    asyncio.run(run())


def test_a_server_that_drains_waits_for_who_reads() -> None:
    with tiny_server() as server:
        reader = SlowReader(server, prompt="Hello", max_tokens=9)
        server.wait_until(lambda: server.llm.statistics().requests == 1)
        server.wait_until(lambda: not server.serving.exchanges)
        server.server.handle_exit(15, None)
        server.wait_until(lambda: server.serving.is_draining)
        assert not server.server.should_exit
        reader.read_on()
        server.wait_until(lambda: server.server.should_exit)
        assert reader.pieces[-2] == b"data: [DONE]\n\n"


def test_a_stream_that_waits_says_so_and_one_that_speaks_does_not() -> None:
    limits = ServerLimits(silent_s=0.02)
    with tiny_server(limits=limits, max_num_seqs=1, num_tokens=512) as server:
        running = begin(server)
        http = server.http()
        body = {"model": MODEL, "prompt": "Hi", "max_tokens": 2, "stream": True}
        with http.stream("POST", "/v1/completions", json=body) as waiting:
            assert waiting.headers["x-accel-buffering"] == "no"
            assert waiting.headers["cache-control"] == "no-cache"
            lines = waiting.iter_lines()
            assert [next(lines) for _ in range(4)] == [": keep-alive", ""] * 2
            running.close()
            rest = [line for line in lines if line and line != ": keep-alive"]
        assert rest[-1] == "data: [DONE]" and all(line.startswith("data: {") for line in rest[:-1])
        # OpenAI's client takes no notice of them.
        running = begin(server)
        stream = server.client().completions.create(
            **{**LONG, "prompt": "Hi", "max_tokens": 5, "stream": True}
        )
        running.close()
        assert list(stream)[-1].choices[0].finish_reason == "length"


def test_while_draining_what_runs_is_finished_and_what_comes_gets_503() -> None:
    with tiny_server() as server:
        running = begin(server, max_tokens=100)
        http = server.http()
        assert http.get("/health").status_code == 200
        server.server.handle_exit(15, None)
        server.wait_until(lambda: server.serving.is_draining)
        with pytest.raises(openai.InternalServerError, match="shutting down") as refusal:
            server.client().completions.create(model=MODEL, prompt="Hi")
        assert refusal.value.status_code == 503 and "retry-after" in refusal.value.response.headers
        assert http.get("/health").status_code == 503
        rest = list(running)
        assert rest[-1].choices[0].finish_reason == "length"


def test_what_does_not_finish_while_draining_is_broken_off_and_told_so() -> None:
    with tiny_server(serving={"drain_s": 0.0}) as server:
        running = begin(server)
        server.server.handle_exit(15, None)
        with pytest.raises(openai.APIError, match="shutting down"):
            list(running)


@pytest.mark.parametrize("stream", [False, True])
def test_what_draining_breaks_off_is_counted_once_and_so_is_what_it_refuses(stream: bool) -> None:
    with tiny_server(serving={"drain_s": 60.0}) as server:
        http = server.http()
        body = {**LONG["extra_body"], "prompt": ["Hello", "Hi"], "max_tokens": 500}
        told: list[str] = []
        asking = threading.Thread(
            target=lambda: told.append(
                server.http().post("/v1/completions", json={**body, "stream": stream}).text
            )
        )
        asking.start()
        server.wait_until(lambda: server.llm.statistics().requests == 2)
        assert http.get("/health").status_code == 200
        server.server._drain_s = 0.0
        server.serving.is_draining = True
        assert http.post("/v1/completions", json=body).status_code == 503
        server.serving.break_off_all(BrokenOff.shutting_down())
        asking.join(60)
        assert "shutting down" in told[0]
        counted = {
            line for line in http.get("/metrics").text.splitlines() if line.startswith("pagedkv_re")
        }
        assert 'pagedkv_requests_finished_total{reason="error"} 2.0' in counted
        assert 'pagedkv_requests_refused_total{reason="shutting_down"} 1.0' in counted


@pytest.mark.parametrize("stream", [False, True])
def test_a_failing_step_fails_its_requests_clearly_and_the_server_goes_on(
    stream: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with tiny_server() as server:
        model = server.llm._engine.model
        right = model.logits

        def fail(*arguments: Any) -> Any:
            if server.llm.num_steps > 3:
                raise RuntimeError(f"the model broke, {stream}")
            return right(*arguments)

        monkeypatch.setattr(model, "logits", fail)
        with pytest.raises(openai.APIError, match="failed: the model broke"):
            made = server.client().completions.create(**LONG, prompt=["Hello", "Hi"], stream=stream)
            list(made)
        monkeypatch.setattr(model, "logits", right)
        answer = server.client().completions.create(model=MODEL, prompt="Hi", max_tokens=2)
        assert answer.choices[0].finish_reason == "length"
        assert server.used_blocks == 0
        server.llm.verify()
        assert [r.message for r in caplog.records].count(
            f"a step failed: the model broke, {stream}"
        ) == 1
        page = server.http().get("/metrics").text
        assert 'pagedkv_requests_finished_total{reason="error"} 2.0' in page


def test_a_scheduler_that_fails_fails_everybody_instead_of_trying_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with tiny_server() as server:
        scheduler = server.llm._engine.scheduler
        right = scheduler.schedule

        def fail() -> Any:
            raise RuntimeError("no plan")

        monkeypatch.setattr(scheduler, "schedule", fail)
        with pytest.raises(openai.InternalServerError, match="no plan"):
            server.client().completions.create(model=MODEL, prompt="Hello")
        monkeypatch.setattr(scheduler, "schedule", right)
        server.client().completions.create(model=MODEL, prompt="Hi", max_tokens=2)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is full")
def test_a_recording_that_fails_is_told_once_and_the_server_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    failed = "pagedkv_recording_failed"
    with (
        pytest.raises(InvalidInput, match="No space left"),
        tiny_server(record=tmp_path / "run.jsonl") as server,
    ):
        page = server.http().get("/metrics").text
        assert f"{failed} 0.0" in page
        recorder = server.llm._recorder
        assert recorder is not None and recorder._file is not None
        recorder._file.close()
        recorder._file = open("/dev/full", "wb", buffering=0)  # noqa: SIM115
        for _ in range(3):
            server.client().completions.create(model=MODEL, prompt="Hi", max_tokens=2)
        assert f"{failed} 1.0" in server.http().get("/metrics").text
    [record] = [found for found in caplog.records if "recording" in found.getMessage()]
    assert "No space left" in record.getMessage()


def test_a_broken_law_stops_admission_and_says_so() -> None:
    with tiny_server() as server:
        http = server.http()
        assert http.get("/debug/verify").json() == {"verified": True, "laws": []}
        server.client().completions.create(model=MODEL, prompt="Hello", max_tokens=2)
        with server.llm.between_steps() as engine:
            engine.scheduler._memory.pool.ref_count[3] += 1
        told = http.get("/debug/verify")
        assert told.status_code == 500 and told.json()["laws"]
        with pytest.raises(openai.InternalServerError, match="a law of the memory is broken"):
            server.client().completions.create(model=MODEL, prompt="Hello")
        assert http.get("/health").status_code == 503


def test_the_laws_are_checked_once_after_work_and_not_while_there_is_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pagedkv.server.lifecycle.IDLE_S", 0.01)
    with tiny_server() as server:
        checks: list[bool] = []
        verify = server.llm._engine.scheduler.verify
        monkeypatch.setattr(
            server.llm._engine.scheduler,
            "verify",
            lambda: (checks.append(bool(server.serving.exchanges)), verify()),
        )
        running = begin(server)
        for _ in range(20):
            next(running)
        assert checks == []
        running.close()
        server.wait_until(lambda: checks)
        time.sleep(0.3)
        assert checks == [False]


def test_the_laws_are_checked_when_nobody_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    with tiny_server() as server:
        scheduler = server.llm._engine.scheduler

        def broken() -> None:
            raise BrokenLaw(["law 1 does not hold"])

        monkeypatch.setattr(scheduler, "verify", broken)
        assert server.serving.broken_law is None
        server.client().completions.create(model=MODEL, prompt="Hello", max_tokens=2)
        server.wait_until(lambda: server.serving.broken_law is not None)
        assert "law 1" in server.http().get("/health").json()["error"]["message"]


def test_the_memory_page_is_told_of_the_time_before_it_was_opened(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pagedkv.server.memory_page.history.INTERVAL_S", 0.0)
    monkeypatch.setattr("pagedkv.server.memory_page.watch._LATE_S", 0.01)
    with tiny_server() as server:
        server.client().completions.create(**LONG, prompt="Hello")
        history = server.server._watch._history
        server.wait_until(lambda: history.samples(time.perf_counter())[-2:, 1].tolist() == [0, 0])
        with server.http().stream("GET", "/memory/stream") as answer:
            facts, arrays = next(read_messages(answer.iter_raw()))
        assert facts["kind"] == "whole"
        tokens_per_s = arrays["samples"][:, 1].tolist()
        assert max(tokens_per_s) > 0 and tokens_per_s[-2:] == [0, 0]


def test_a_second_signal_ends_it_at_once_and_who_waits_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with tiny_server(serving={"drain_s": 1e9}) as server:
        stream = begin(server)
        server.server.handle_exit(signal.SIGTERM, None)
        server.wait_until(lambda: server.serving.is_draining)
        server.server.handle_exit(signal.SIGTERM, None)
        with pytest.raises(openai.APIError, match="shutting down"):
            list(stream)
        server.wait_until(lambda: server.server.should_exit)
    assert "Exception in ASGI" not in caplog.text
