"""Who may come in, and when whoever may not should come again; on an engine that a test plays."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the extra [engine]")
pytest.importorskip("fastapi", reason="needs the extra [server]")
pytest.importorskip("prometheus_client", reason="needs the extra [server]")

from pagedkv.engine import SamplingParams
from pagedkv.engine.outputs import Chunk
from pagedkv.errors import BrokenLaw, InvalidInput
from pagedkv.server import serving as served
from pagedkv.server.errors import ApiError, BrokenOff
from pagedkv.server.exchange import ClientLeft, Exchange
from pagedkv.server.limits import ServerLimits
from pagedkv.server.serving import Serving


class Engine:
    """An `LLM` that does nothing, and knows what it was asked."""

    def __init__(self) -> None:
        self.num_waiting = 0
        self.recording_failure: str | None = None
        self.withdrawn: list[Any] = []
        self.listeners: list[Any] = []
        self.vocab_size = 100
        self.max_model_len = 50
        self.budget = SimpleNamespace(num_blocks=12, block_size=4)
        self.num_steps = 0
        self.num_checks = 0
        self.is_broken = False
        self.scheduler = self

    def watch(self, watcher: Any) -> None:
        self.watcher = watcher

    def submit(self, ids: Any, params: Any, tell: Any, *, namespace: Any) -> Any:
        self.listeners.append(tell)
        return SimpleNamespace(ids=ids, request=None)

    def withdraw(self, order: Any) -> None:
        self.withdrawn.append(order.ids)

    @contextlib.contextmanager
    def between_steps(self) -> Iterator[Engine]:
        yield self

    def verify(self) -> None:
        self.num_checks += 1
        if self.is_broken:
            raise BrokenLaw(["law 1 does not hold"])


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What time it is: the last number."""
    now_s = [100.0]
    monkeypatch.setattr(served.time, "perf_counter", lambda: now_s[-1])
    return now_s


class Played:
    """A server on that engine."""

    def __init__(self, **limits: int) -> None:
        self.engine = Engine()
        llm: Any = self.engine
        self.serving = Serving(llm, model_name="m", limits=ServerLimits(**limits))

    def ask(self, *, is_streamed: bool = False, num_prompts: int = 1, n: int = 1) -> Exchange:
        return self.serving.exchange(
            [[5, i] for i in range(num_prompts)],
            SamplingParams(n=n),
            namespace=None,
            is_streamed=is_streamed,
            arrived_s=100.0,
        )

    def counted(self, kind: str, reason: str) -> float | None:
        return self.serving._metrics.registry.get_sample_value(
            f"pagedkv_requests_{kind}_total", {"reason": reason}
        )


def refused(played: Played, **options: Any) -> ApiError:
    with pytest.raises(ApiError) as refusal:
        played.ask(**options)
    return refusal.value


def test_whoever_may_not_wait_is_told_when_half_of_those_who_do_will_have_gone(
    clock: list[float],
) -> None:
    played = Played(max_waiting=30)
    played.engine.num_waiting = 29
    played.ask()
    played.engine.num_waiting = 30
    assert refused(played).retry_after_s == 1  # nobody knows
    exchanges = list(played.serving.exchanges)
    played.engine.num_waiting = 0
    exchanges += [played.ask() for _ in range(9)]
    played.engine.num_waiting = 30
    for i, exchange in enumerate(exchanges):
        clock.append(110.0 + i)
        exchange.close()
        if i == 0:
            clock.append(118.0)
            assert refused(played).retry_after_s == 1  # one end is no pace
        if i == 1:
            clock.append(113.0)
            assert refused(played).retry_after_s == 23  # two in 3 seconds, and 15 are to go
    clock.append(130.0)
    assert refused(played).retry_after_s == 30  # ten in 20 seconds, and 15 are to go
    clock.append(1_000.0)
    assert refused(played).retry_after_s == 60
    clock.append(110.0)
    assert refused(played).retry_after_s == 1


def test_the_pace_is_that_of_the_last_answers_alone(clock: list[float]) -> None:
    played = Played(max_waiting=4)
    exchanges = [played.ask() for _ in range(33)]
    for i, exchange in enumerate(exchanges):
        clock.append(100.0 if i == 0 else 1_000.0)
        exchange.close()
    clock.append(1_064.0)
    played.engine.num_waiting = 64
    assert refused(played).retry_after_s == 60
    played.engine.num_waiting = 8
    assert refused(played).retry_after_s == 8  # 32 in 64 seconds, and 4 are to go


def test_prompts_that_are_read_wait_too_and_no_longer_when_they_are_read() -> None:
    played = Played(max_waiting=2)
    with played.serving.reading(), pytest.raises(RuntimeError), played.serving.reading():
        assert "2 sequences wait" in refused(played).message
        with pytest.raises(ApiError, match="2 sequences wait"), played.serving.reading():
            raise AssertionError
        raise RuntimeError
    assert played.serving.num_reading == 0
    played.ask()
    played.serving.is_draining = True
    with pytest.raises(ApiError, match="shutting down"), played.serving.reading():
        raise AssertionError
    assert refused(played).code == "shutting_down" and played.serving.num_reading == 0


def test_streams_count_until_they_are_closed_and_others_do_not() -> None:
    played = Played(max_streams=2)
    streams = [played.ask(is_streamed=True) for _ in range(2)]
    assert refused(played, is_streamed=True).code == "too_many_streams"
    played.ask().close()
    streams[0].break_off(ClientLeft())
    assert refused(played, is_streamed=True).code == "too_many_streams"
    streams[0].close()
    streams[0] = played.ask(is_streamed=True)
    for stream in streams:
        assert played.serving.is_busy
        stream.break_off(ClientLeft())
        assert played.serving.is_busy and stream not in played.serving.exchanges
        stream.close()
    assert not played.serving.is_busy and played.serving.num_streams == 0
    assert played.ask().reason is None and played.serving.is_busy


def test_what_is_broken_off_is_withdrawn_unless_it_has_ended_and_counted_by_its_reason() -> None:
    played = Played()
    for reason, kind in (
        (ClientLeft(), "abort"),
        (BrokenOff(500, "x"), "error"),
        (InvalidInput("x"), None),
    ):
        before = {kind: played.counted("finished", kind) for kind in ("abort", "error")}
        exchange = played.ask(num_prompts=3, n=2)
        first, second, third = exchange.orders
        first.request = SimpleNamespace(is_finished=True, admitted_s=None)
        second.request = SimpleNamespace(is_finished=False, admitted_s=None)
        played.engine.withdrawn.clear()
        exchange.num_going_on = 4
        exchange.break_off(reason)
        assert played.engine.withdrawn == [second.ids, third.ids]
        for found, count in before.items():
            assert count is not None
            assert played.counted("finished", found) == count + 4 * (found == kind)


def test_refusals_are_counted_failures_of_ours_and_what_was_let_in_are_not() -> None:
    played = Played()
    for error in (ApiError(503, "x", code="shutting_down"), ApiError(500, "x", code="failed")):
        played.serving.count_refusal(error)
    played.serving.count_refusal(BrokenOff.shutting_down())
    assert played.counted("refused", "shutting_down") == 1
    assert played.counted("refused", "failed") is None


def test_of_what_is_not_streamed_only_beginnings_and_ends_are_handed_over(
    clock: list[float],
) -> None:
    for is_streamed, kept in ((False, [0, 1, 4, 5]), (True, [0, 1, 2, 3, 4, 5])):
        played = Played()
        played.ask(is_streamed=is_streamed, n=2)
        [tell] = played.engine.listeners
        news: list[Any] = [
            Chunk(0, "a", (5,), None, None),
            Chunk(1, "b", (5,), None, None),
            Chunk(0, "c", (5,), None, None),
            Chunk(1, "d", (5,), None, None),
            Chunk(0, "e", (5,), None, "stop"),
            Chunk(1, "f", (), None, "abort"),
        ]
        for i, chunk in enumerate(news):
            clock.append(100.0 + i * i)
            tell(chunk)
        assert [said for _, _, said in played.serving._said] == [news[i] for i in kept]
        samples = played.serving._metrics.gaps.family().samples
        counted = {sample.name.rpartition("_")[2]: sample.value for sample in samples}
        # An abort brings no token. The others came after 0, 1, 4, 9 and 16 seconds.
        assert counted["count"] == 3 and counted["sum"] == (4 - 0) + (9 - 1) + (16 - 4)


def test_what_is_said_after_the_loop_is_closed_is_said_to_nobody() -> None:
    def closed(*_: Any) -> None:
        raise RuntimeError("Event loop is closed")

    played = Played()
    loop: Any = SimpleNamespace(call_soon_threadsafe=closed)
    played.serving._loop = loop
    played.ask(is_streamed=True)
    played.engine.listeners[0](Chunk(0, "a", (5,), None, None))
    times = SimpleNamespace(total_s=2.0, scheduling_s=0.5, forward_s=1.0, sampling_s=0.25)
    for _ in range(2):  # once more when orders were taken
        played.engine.watcher(SimpleNamespace(last_step=times))
    assert played.serving._said == []
    assert played.serving._metrics.registry.get_sample_value("pagedkv_step_seconds_count") == 1


def test_what_is_said_in_one_step_wakes_all_whom_it_concerns_and_failures_are_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def run() -> None:
        played = Played()
        played.serving.start()
        failure = RuntimeError("no power")
        for news in (Chunk(0, "a", (5,), None, None), failure, InvalidInput("too long")):
            exchanges = [played.ask(is_streamed=True) for _ in range(3)]
            waiting = [asyncio.create_task(exchange.chunks()) for exchange in exchanges]
            await asyncio.sleep(0)
            for tell in played.engine.listeners[-3:]:
                tell(news)
            played.engine.watcher(SimpleNamespace(last_step=None))
            told = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 60)
            if isinstance(news, Chunk):
                assert told == [[(0, news)]] * 3
            else:
                assert all(str(news) in str(found) for found in told)

    asyncio.run(run())
    assert [record.getMessage() for record in caplog.records] == ["a step failed: no power"]


def test_all_that_are_under_way_are_broken_off() -> None:
    played = Played()
    exchanges = [played.ask() for _ in range(3)]
    played.serving.break_off_all(reason := BrokenOff.shutting_down())
    assert [exchange.reason for exchange in exchanges] == [reason] * 3
    assert not played.serving.is_busy


def test_streams_that_say_nothing_are_reminded_twice_in_that_time_and_others_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def run() -> None:
        played = Played(silent_s=8)
        slept_s: list[float] = []
        sleep = asyncio.sleep

        async def slept(delay_s: float) -> None:
            slept_s.append(delay_s)
            await sleep(0)

        waiting = [
            asyncio.create_task(played.ask(is_streamed=is_streamed).chunks())
            for is_streamed in (True, False)
        ]
        monkeypatch.setattr(served.asyncio, "sleep", slept)
        reminding = asyncio.create_task(played.serving.remind_silent_streams())
        assert await asyncio.wait_for(waiting[0], 60) == []
        for _ in range(9):
            await sleep(0)
        assert not waiting[1].done() and set(slept_s) == {4.0}
        for task in (reminding, waiting[1]):
            task.cancel()

    asyncio.run(run())


def test_laws_are_checked_after_steps_while_nobody_waits_until_one_is_broken(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def at_once(look: Callable[[], Any]) -> Any:
        return look()

    monkeypatch.setattr(served.asyncio, "to_thread", at_once)

    async def run() -> None:
        played = Played()
        engine, serving = played.engine, played.serving

        async def checks() -> int:
            """How many there were, when there was time for some more."""
            for _ in range(9):
                await asyncio.sleep(0)
            return engine.num_checks

        checking = asyncio.create_task(serving.verify_when_idle(0.0))
        assert await checks() == 0
        engine.num_steps = 5
        exchange = played.ask()
        assert await checks() == 0
        exchange.close()
        assert await checks() == 1
        engine.is_broken = True
        assert await checks() == 1
        engine.num_steps = 6
        assert await checks() == 2 and serving.broken_law is not None
        engine.num_steps = 7
        assert await checks() == 2 and not checking.done()
        with pytest.raises(BrokenLaw):
            await serving.verify()
        assert refused(played).code == "broken_law"
        checking.cancel()

    asyncio.run(run())
    assert [record.levelname for record in caplog.records] == ["ERROR"]


def test_who_asks_whether_the_laws_hold_waits_for_who_asks_already(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    num_looking = 0

    async def slowly(look: Callable[[], Any]) -> Any:
        nonlocal num_looking
        assert num_looking == 0  # or all threads that there are could look at once
        num_looking += 1
        await asyncio.sleep(0)
        num_looking -= 1
        return look()

    monkeypatch.setattr(served.asyncio, "to_thread", slowly)
    played = Played()

    async def run() -> None:
        await asyncio.gather(*(played.serving.verify() for _ in range(3)))

    asyncio.run(run())
    assert played.engine.num_checks == 3


def test_token_ids_that_the_model_has_not_are_named_and_many_of_them_counted() -> None:
    check = Played().serving.check_vocabulary
    check((), param="x")
    check((0, 99), param="x")
    for wrong, told in (
        ((5, -1), "-1:"),
        ((100, 5), "100:"),
        ((101, 102, 101, 103, 104, 105), "101, 102, 103, 104, 105:"),
        (range(100, 107), "100, 101, 102, 103, 104 and 2 more:"),
    ):
        with pytest.raises(ApiError) as refusal:
            check(wrong, param="x")
        assert refusal.value.message.startswith(f"x has {told} not 0 to 99")


def test_an_answer_may_be_as_long_as_the_model_and_the_memory_take() -> None:
    played = Played()
    for max_model_len, of, longest in ((48, "model", 48), (49, "model", 49), (50, "memory", 49)):
        played.engine.max_model_len = max_model_len
        played.serving.check_room(40, longest - 40, param="max_tokens")
        with pytest.raises(ApiError, match=f"at most {longest - 40}, since the {of} takes"):
            played.serving.check_room(40, longest - 39, param="max_tokens")
        played.serving.check_room(longest, 5, param="max_tokens")  # the engine's to refuse


def test_a_recording_that_cannot_be_written_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    played = Played()
    for failure in (None, "no room for it", "no room for it"):
        played.engine.recording_failure = failure
        played.engine.watcher(SimpleNamespace(last_step=None))
    [record] = caplog.records
    assert record.getMessage().startswith("no room for it; what is asked is answered")
