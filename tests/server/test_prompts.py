"""Long prompts become token ids one after another, and nobody waits for what nobody wants."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Coroutine
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the extra [engine]")
pytest.importorskip("fastapi", reason="needs the extra [server]")
pytest.importorskip("prometheus_client", reason="needs the extra [server]")
pytest.importorskip("openai", reason="needs OpenAI's client")

import httpx

from models.tiny_server import tiny_server
from pagedkv.server.errors import ApiError
from pagedkv.server.event_stream import unless_left
from pagedkv.server.exchange import ClientLeft
from pagedkv.server.limits import ServerLimits
from pagedkv.server.prompts import PromptReader

LONG = "x" * 3_000


class SlowTokenizer:
    """A token for each letter, once it may go on; it knows what it was given."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.begun = threading.Event()
        self.may_go_on = threading.Event()

    def get_vocab(self) -> dict[str, int]:
        return {"x": 0, "yyyy": 1}

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        self.seen.append(text)
        self.begun.set()
        assert self.may_go_on.wait(60)
        return {"input_ids": [0] * len(text)}


class FewTokens(SlowTokenizer):
    """One whose texts fit into the tiny model, however long they are."""

    def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
        return {"input_ids": super().__call__(text, **options)["input_ids"][:9]}

    chat_template = "any"

    def apply_chat_template(self, *_: Any, **__: Any) -> str:
        return LONG


async def stays() -> Any:
    """What a client that stays says: nothing more."""
    await asyncio.Event().wait()


async def reads(reader: PromptReader, text: str, receive: Any = stays) -> list[int]:
    [ids] = await reader.texts([text], receive, param="prompt")
    return ids


async def begun(tokenizer: SlowTokenizer, reading: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """A task whose prompt the tokenizer is at."""
    task = asyncio.create_task(reading)
    await asyncio.to_thread(tokenizer.begun.wait, 60)
    return task


def test_a_text_that_cannot_fit_is_refused_before_it_is_read() -> None:
    async def run() -> None:
        tokenizer = SlowTokenizer()
        tokenizer.may_go_on.set()
        reader = PromptReader(tokenizer, max_tokens=1_000, queue=contextlib.nullcontext)
        assert len(await reads(reader, "x" * 4_000)) == 4_000
        with pytest.raises(ApiError, match="4001 characters, at most 4000") as refusal:
            await reads(reader, "x" * 4_001)
        assert refusal.value.status == 400 and refusal.value.param == "prompt"
        with pytest.raises(ApiError, match="4002 characters") as refusal:
            await reader.chat([{"role": "user", "content": "x" * 3_998}], stays)
        assert refusal.value.param == "messages" and len(tokenizer.seen) == 1
        reader.close()

    asyncio.run(run())


def test_the_prompt_of_a_client_that_left_is_not_begun() -> None:
    async def run() -> None:
        tokenizer = SlowTokenizer()
        reader = PromptReader(tokenizer, max_tokens=1_000, queue=contextlib.nullcontext)
        first = await begun(tokenizer, reads(reader, LONG))
        left = asyncio.Event()

        async def leaves() -> Any:
            await left.wait()
            return {"type": "http.disconnect"}

        second = asyncio.create_task(reads(reader, LONG + "2", leaves))
        third = asyncio.create_task(reads(reader, LONG + "3"))
        await asyncio.sleep(0)
        left.set()
        with pytest.raises(ClientLeft):
            await second
        tokenizer.may_go_on.set()
        assert len(await first) == 3_000 and len(await third) == 3_001
        assert tokenizer.seen == [LONG, LONG + "3"]
        reader.close()

    asyncio.run(run())


async def leaves_when(left: asyncio.Event) -> Any:
    """What a client says that leaves when it is told to."""
    await left.wait()
    return {"type": "http.disconnect"}


def test_of_many_texts_those_that_nobody_wants_any_more_are_not_begun() -> None:
    async def run() -> None:
        tokenizer = SlowTokenizer()
        reader = PromptReader(tokenizer, max_tokens=1_000, queue=contextlib.nullcontext)
        left = asyncio.Event()
        reading = reader.texts([LONG, LONG + "2"], lambda: leaves_when(left), param="prompt")
        task = await begun(tokenizer, reading)
        left.set()
        with pytest.raises(ClientLeft):
            await task
        tokenizer.may_go_on.set()
        assert len(await reads(reader, LONG + "3")) == 3_001
        assert tokenizer.seen == [LONG, LONG + "3"]
        reader.close()

    asyncio.run(run())


def test_what_is_ready_when_its_client_has_left_is_given_to_nobody() -> None:
    async def run() -> None:
        for turns in range(2):
            left = asyncio.Event()
            ready: asyncio.Future[int] = asyncio.get_running_loop().create_future()
            waiting = asyncio.create_task(unless_left(lambda left=left: leaves_when(left), ready))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            ready.set_result(5)
            for _ in range(turns):
                await asyncio.sleep(0)
            left.set()
            with pytest.raises(ClientLeft):
                await waiting
        ready = asyncio.get_running_loop().create_future()
        ready.set_result(5)
        assert await unless_left(stays, ready) == 5

    asyncio.run(run())


@pytest.mark.parametrize(
    ("path", "body", "prompts", "answers"),
    [
        ("/v1/completions", {"prompt": LONG, "max_tokens": 5}, 1, 1),
        ("/v1/completions", {"prompt": [LONG, LONG], "n": 3, "seed": 1, "stream": True}, 2, 6),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}, 1, 1),
        ("/tokenize", {"prompt": LONG}, 0, 0),
    ],
)
def test_a_prompt_is_not_admitted_whose_client_left_while_it_was_read_and_is_counted(
    path: str, body: dict[str, Any], prompts: int, answers: int
) -> None:
    with tiny_server() as server:
        tokenizer = FewTokens()
        right = server.server._reader._tokenizer
        server.server._reader._tokenizer = tokenizer
        server.server._reader._max_characters = 10_000
        said = json.dumps(body).encode()
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as leaving:
            leaving.sendall(
                b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                b"Content-Length: %d\r\n\r\n%s" % (path.encode(), len(said), said)
            )
            assert tokenizer.begun.wait(60)
        server.wait_until(lambda: server.serving.num_reading == 0)
        page = server.http().get("/metrics").text
        assert f'pagedkv_requests_finished_total{{reason="abort"}} {answers}.0' in page
        assert f"pagedkv_request_queue_time_seconds_count {prompts}.0" in page
        tokenizer.may_go_on.set()
        server.server._reader._tokenizer = right
        with server.http() as http:
            # One after the other: what is read now was to be read after what nobody wants.
            assert http.post("/tokenize", json={"prompt": LONG}).status_code == 200
            assert http.post("/v1/completions", json={"prompt": "Hi"}).status_code == 200
        assert server.llm.statistics().requests == 1 and len(tokenizer.seen) == 1
        assert not server.serving.exchanges


def test_who_waits_for_the_tokenizer_is_told_when_it_is_closed() -> None:
    async def run() -> None:
        tokenizer = SlowTokenizer()
        reader = PromptReader(tokenizer, max_tokens=1_000, queue=contextlib.nullcontext)
        first = await begun(tokenizer, reads(reader, LONG))
        second = asyncio.create_task(reads(reader, LONG))
        await asyncio.sleep(0)
        reader.close()
        for task in (first, second, asyncio.create_task(reads(reader, LONG))):
            with pytest.raises(ApiError, match="shutting down") as told:
                await task
            assert told.value.status == 503
        tokenizer.may_go_on.set()
        assert tokenizer.seen == [LONG]

    asyncio.run(run())


def test_a_server_that_drains_waits_for_prompts_and_tells_who_waits_too_long() -> None:
    def ask(http: httpx.Client, told: list[int]) -> None:
        told.append(http.post("/tokenize", json={"prompt": LONG}).status_code)

    for drain_s, status in ((60, 200), (0, 503)):
        with tiny_server(serving={"drain_s": drain_s}) as server, server.http() as http:
            tokenizer = SlowTokenizer()
            server.server._reader._tokenizer = tokenizer
            server.server._reader._max_characters = 10_000
            told: list[int] = []
            asking = threading.Thread(target=ask, args=(http, told))
            asking.start()
            assert tokenizer.begun.wait(60)
            server.server.handle_exit(15, None)
            if drain_s:
                server.wait_until(lambda: server.serving.is_draining)
                assert not server.server.should_exit
                tokenizer.may_go_on.set()
            asking.join(60)
            tokenizer.may_go_on.set()
            assert told == [status]


def test_prompts_that_wait_for_the_tokenizer_count_among_those_who_wait() -> None:
    with tiny_server(limits=ServerLimits(max_waiting=2)) as server, server.http() as http:
        server.serving.num_reading = 2
        for path, body in (
            ("/v1/completions", {"prompt": "Hi"}),
            ("/detokenize", {"tokens": [5] * 2_001}),
        ):
            told = http.post(path, json=body)
            assert told.status_code == 429, told.text
            assert told.json()["error"]["code"] == "queue_full"
            assert int(told.headers["retry-after"]) >= 1
        server.serving.num_reading = 0
        assert http.post("/v1/completions", json={"prompt": "Hi"}).status_code == 200
        assert http.post("/detokenize", json={"tokens": [5] * 2_001}).status_code == 200
        told = http.post("/tokenize", json={"prompt": "x" * 100_000})
        assert told.status_code == 400 and "characters" in told.text
