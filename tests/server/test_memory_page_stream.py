"""The memory page's endpoints: who is told what, when, and that nothing is done for nobody."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("fastapi", reason="needs the extra [server]")
pytest.importorskip("uvicorn", reason="needs the extra [server]")
pytest.importorskip("httpx", reason="needs httpx")

import httpx

from models.memory_messages import read_messages
from models.memory_picture import Picture
from models.still_server import StillServer
from pagedkv.server.memory_page.changes import Changes, Differ
from pagedkv.server.memory_page.endpoints import FILES
from pagedkv.server.memory_page.happenings import ADMISSION, Happenings
from pagedkv.server.memory_page.history import History
from pagedkv.server.memory_page.watch import MAX_WATCHERS

Message = tuple[dict[str, Any], dict[str, Any]]


@contextlib.contextmanager
def watching(server: StillServer, **headers: str) -> Iterator[Iterator[Message]]:
    with httpx.stream("GET", f"{server.url}/memory/stream", headers=headers, timeout=60) as answer:
        assert answer.status_code == 200
        yield read_messages(answer.iter_raw())


async def kept_until_there_are(server: StillServer, num_samples: int) -> None:
    keeping = asyncio.create_task(server.watch.keep_history())
    while len(server.watch._history.samples(time.perf_counter())) < num_samples:
        assert not keeping.done()
        await asyncio.sleep(0.01)
    keeping.cancel()


@pytest.fixture
def server() -> Iterator[StillServer]:
    with StillServer().running() as made:
        yield made


def test_a_watcher_is_told_the_whole_and_then_what_changes(server: StillServer) -> None:
    server.scheduler.add([1, 2, 3, 4, 5], max_new_tokens=8)
    server.step()
    with watching(server) as messages:
        facts, arrays = next(messages)
        assert facts["kind"] == "whole"
        assert facts["memory"]["num_blocks"] == 64 and facts["memory"]["block_size"] == 4
        picture = Picture(64, *server.scheduler.arrays.memory.tables.entries.shape)
        picture.apply(Changes(arrays["blocks"], arrays["tables"], arrays["sequences"]))
        assert picture.blocks[:3, 1].tolist() == [1, 1, 0]
        assert arrays["regions_longest"].tolist() == [[0, 64, 0]]
        assert arrays["regions_limit"].tolist() == [[0, 12, 0]]
        for _ in range(4):
            server.step()
        while picture.by_column[0][5] < 10:
            facts, arrays = next(messages)
            assert facts["kind"] == "changes"
            picture.apply(Changes(arrays["blocks"], arrays["tables"], arrays["sequences"]))
        assert picture.tables[0, :3].tolist() == [0, 1, 2]
        assert facts["counters"]["output_tokens"] == 5


def test_what_steps_did_between_two_looks_is_told_together(server: StillServer) -> None:
    with watching(server) as messages:
        next(messages)
        server.scheduler.add([1, 2, 3, 4, 5], max_new_tokens=8, num_samples=2)
        server.step()
        server.step()
        told: list[list[int]] = []
        while len(told) < 3:
            _, arrays = next(messages)
            told += arrays["happenings"].tolist()
        assert [row[0] for row in told] == [0, 1, 2]


def test_what_the_last_step_did_is_told_where_steps_are_scheduled_ahead(
    server: StillServer,
) -> None:
    scheduler = server.scheduler
    with watching(server) as messages:
        next(messages)
        with server.lock:
            [first] = scheduler.add([1, 2, 3], max_new_tokens=1)
            scheduler.schedule()
            [second] = scheduler.add([4, 5, 6], max_new_tokens=1)
            assert scheduler.schedule_ahead() is not None
            scheduler.commit([7])
            scheduler.finish([first])
            server.tell()
            scheduler.commit([7])  # and no step comes after this one
            server.tell()
        told: list[list[int]] = []
        while len(told) < 2:
            told += next(messages)[1]["happenings"].tolist()
        assert [row[0] for row in told] == [ADMISSION, ADMISSION]
        assert told[0][2] != told[1][2]
        scheduler.finish([second])


def test_nothing_is_looked_at_while_nobody_watches(
    server: StillServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = []
    look = Differ.look

    def counted(self: Differ, *arguments: Any, **options: Any) -> Changes:
        looks.append(1)
        return look(self, *arguments, **options)

    notes = []
    note = Happenings.note

    def noted(self: Happenings, *arguments: Any) -> None:
        notes.append(1)
        note(self, *arguments)

    monkeypatch.setattr(Differ, "look", counted)
    monkeypatch.setattr(Happenings, "note", noted)
    monkeypatch.setattr("pagedkv.server.memory_page.watch.LINGER_S", 60.0)
    server.scheduler.add([1, 2, 3], max_new_tokens=30)
    for _ in range(5):
        server.step()
    assert not looks
    with watching(server) as messages:
        next(messages)
        server.step()
    assert looks and notes
    [watcher] = server.watchers
    watch = watcher.__self__  # type: ignore[attr-defined]
    for _ in range(2_000):
        if not watch._session.is_awake:
            break
        time.sleep(0.01)
    during = len(looks), len(notes)
    for _ in range(5):
        server.step()
    assert (len(looks), len(notes)) == during


def test_a_step_takes_the_look_that_is_due(
    server: StillServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagedkv.server.memory_page.watch._ROUND_S", 3_600.0)
    server.scheduler.add([1, 2, 3], max_new_tokens=30)
    with watching(server) as messages:
        next(messages)
        before = server.scheduler.num_steps
        time.sleep(0.15)
        server.step()
        assert next(messages)[0]["counters"]["num_steps"] == before + 1
        server.step()  # too soon
        time.sleep(0.15)
        server.step()
        assert next(messages)[0]["counters"]["num_steps"] == before + 3


def test_who_comes_while_nothing_happens_is_told_the_whole_at_once(
    server: StillServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagedkv.server.memory_page.watch.IDLE_INTERVAL_S", 1e9)
    with watching(server) as messages, contextlib.ExitStack() as later:
        assert next(messages)[0]["kind"] == "whole"
        for _ in range(2):
            second = later.enter_context(watching(server))
            assert next(second)[0]["kind"] == "whole"


def test_while_nothing_happens_there_is_a_message_now_and_then_all_the_same(
    server: StillServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagedkv.server.memory_page.watch.IDLE_INTERVAL_S", 0.01)
    with watching(server) as messages:
        kinds = [next(messages)[0]["kind"] for _ in range(4)]
    assert kinds == ["whole", "changes", "changes", "changes"]


def test_a_region_goes_when_its_sequence_ends_though_nobody_comes(server: StillServer) -> None:
    [sequence] = server.scheduler.add([1, 2, 3], max_new_tokens=30)
    with watching(server) as messages:
        assert len(next(messages)[1]["regions_longest"]) == 1
        server.scheduler.cancel([sequence])
        server.tell()
        told = [arrays for _, arrays in itertools.islice(messages, 3)]
        [regions] = [arrays for arrays in told if "regions_longest" in arrays]
        assert len(regions["regions_longest"]) == len(regions["regions_limit"]) == 0


def test_who_watches_is_told_each_sample_once(
    server: StillServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagedkv.server.memory_page.history.INTERVAL_S", 0.0)
    server.scheduler.add([1, 2, 3], max_new_tokens=50)
    with watching(server) as messages:
        told = len(next(messages)[1]["samples"])
        for _ in range(3):
            server.step()
        num_samples = len(server.watch._history.samples(time.perf_counter()))
        assert num_samples == 2  # the first step began the first second
        for _ in range(3):
            facts, arrays = next(messages)
            assert facts["kind"] == "changes"
            told += len(arrays["samples"])
        assert told == num_samples


def test_who_comes_is_told_of_the_time_in_which_nobody_watched(
    server: StillServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagedkv.server.memory_page.history.INTERVAL_S", 0.0)
    server.scheduler.add([1, 2, 3], max_new_tokens=50)
    for _ in range(5):
        server.step()
    with watching(server) as messages:
        facts, arrays = next(messages)
        assert facts["kind"] == "whole" and len(arrays["samples"]) >= 4
        ages, tokens_per_s = arrays["samples"][:4, 0].tolist(), arrays["samples"][:4, 1]
        assert ages == sorted(ages, reverse=True) and ages[-1] > 0
        assert (tokens_per_s > 0).all()


def test_while_nothing_happens_and_nobody_watches_there_are_samples_too(
    server: StillServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagedkv.server.memory_page.history.INTERVAL_S", 0.0)
    monkeypatch.setattr("pagedkv.server.memory_page.watch._LATE_S", 0.01)
    server.scheduler.add([1, 2, 3], max_new_tokens=50)
    server.step()
    asyncio.run(kept_until_there_are(server, 3))
    with watching(server) as messages:
        samples = next(messages)[1]["samples"]
        assert len(samples) >= 3 and (samples[:3, 1] == 0).all()
        assert samples[0, 3] == samples[-1, 3] > 0


def test_a_sample_that_fails_ends_the_history_and_the_steps_go_on(
    server: StillServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(*_: Any) -> None:
        raise ValueError("no sample")

    monkeypatch.setattr(History, "note", failing)
    server.scheduler.add([1, 2, 3], max_new_tokens=50)
    server.step()
    server.step()
    assert caplog.text.count("history ends: no sample") == 1
    with watching(server) as messages:
        assert next(messages)[1]["samples"].shape == (0, 6)


def test_samples_are_told_once_to_each_also_where_somebody_comes_later(server: StillServer) -> None:
    def taken_s(message: Message) -> list[float]:
        head, arrays = message
        return [head["now_s"] - float(age_s) for age_s in arrays["samples"][:, 0]]

    server.scheduler.add([1, 2, 3], max_new_tokens=50)
    for _ in range(4):
        server.step()
        time.sleep(0.4)
    with watching(server) as messages, contextlib.ExitStack() as later:
        told = taken_s(next(messages))
        assert told
        second = later.enter_context(watching(server))
        assert taken_s(next(second))[: len(told)] == pytest.approx(told, abs=0.01)
        for message in itertools.islice(messages, 3):
            told += taken_s(message)
        assert (np.diff(told) > 0.9).all()


def test_a_server_that_drains_ends_its_streams() -> None:
    with StillServer().running() as server, watching(server) as messages:
        next(messages)
        server.is_draining = True
        for _ in messages:
            pass


def test_a_page_that_is_loaded_anew_finds_the_same_names(server: StillServer) -> None:
    [ended] = server.scheduler.add([1, 2], max_new_tokens=30)
    with watching(server) as messages:
        assert next(messages)[1]["sequences"][:, 1].tolist() == [1]
        server.scheduler.cancel([ended])
        server.scheduler.add([3, 4], max_new_tokens=30)
        server.tell()
        while 2 not in next(messages)[1]["sequences"][:, 1]:
            pass
    with watching(server) as messages:
        assert next(messages)[1]["sequences"][:, 1].tolist() == [2]


def test_when_nobody_has_watched_for_a_while_all_is_forgotten(
    server: StillServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagedkv.server.memory_page.watch.LINGER_S", 0.0)
    with watching(server) as messages:
        next(messages)
    [watcher] = server.watchers
    watch = watcher.__self__  # type: ignore[attr-defined]
    while watch._session is not None:
        time.sleep(0.01)
    with watching(server) as messages:
        assert next(messages)[0]["kind"] == "whole"


def test_a_look_that_fails_ends_the_stream_and_the_steps_go_on(
    server: StillServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with watching(server) as messages:
        next(messages)

        def failing(*_: Any, **__: Any) -> Changes:
            raise ValueError("no look")

        monkeypatch.setattr(Differ, "look", failing)
        server.scheduler.add([1, 2, 3], max_new_tokens=30)
        server.step()
        for _ in messages:
            server.step()
    assert "watching the memory failed: no look" in caplog.text
    server.step()


def test_more_pages_than_may_watch_are_refused_until_one_leaves(server: StillServer) -> None:
    with contextlib.ExitStack() as stack:
        open_pages = [stack.enter_context(watching(server)) for _ in range(MAX_WATCHERS)]
        for messages in open_pages:
            next(messages)
        refused = httpx.get(f"{server.url}/memory/stream")
        assert refused.status_code == 429 and refused.headers["Retry-After"]
        assert refused.json()["error"]["code"] == "too_many_watchers"
    for _ in range(500):
        with httpx.stream("GET", f"{server.url}/memory/stream") as answer:
            if answer.status_code == 200:
                break
        time.sleep(0.01)
    else:
        raise AssertionError("nobody could watch again")


def test_one_who_does_not_read_is_told_the_whole_again(server: StillServer) -> None:
    [watcher] = server.watchers
    watch = watcher.__self__  # type: ignore[attr-defined]
    with watching(server) as messages:
        next(messages)
        [behind] = watch._watchers
        ready = threading.Event()

        async def stop_reading() -> None:
            behind.news.clear()
            behind.mailbox.extend([b""] * 20)  # what it did not take
            ready.set()

        watch._session._loop.call_soon_threadsafe(
            lambda: watch._session._loop.create_task(stop_reading())
        )
        assert ready.wait(60)
        assert any(facts["kind"] == "whole" for facts, _ in (next(messages) for _ in range(4)))


def test_the_page_is_open_and_the_stream_is_for_those_with_a_key() -> None:
    with StillServer(keys=("sesame",)).running() as server:
        for path in FILES:
            assert httpx.get(server.url + path).status_code == 200
        assert httpx.get(f"{server.url}/memory/stream").status_code == 401
        with watching(server, Authorization="Bearer sesame") as messages:
            assert next(messages)[0]["kind"] == "whole"


def test_the_page_may_load_nothing_from_elsewhere_and_stand_in_no_frame(
    server: StillServer,
) -> None:
    answer = httpx.get(f"{server.url}/memory")
    assert answer.headers["Content-Type"] == "text/html; charset=utf-8"
    policy = answer.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy and "http" not in policy
    assert answer.headers["X-Content-Type-Options"] == "nosniff"


def test_a_query_changes_nothing_of_the_page(server: StillServer) -> None:
    hostile = {"content": "<script>alert(1)</script>", "media_type": "text/plain"}
    answer = httpx.get(f"{server.url}/memory", params=hostile)
    assert answer.content == FILES["/memory"][0]
    assert answer.headers["Content-Type"] == "text/html; charset=utf-8"


def test_the_colours_are_those_of_the_simulators_report(server: StillServer) -> None:
    base = httpx.get(f"{server.url}/memory/base.css").text
    assert "--cached: #009E73" in base and "--shared: #CC79A7" in base
