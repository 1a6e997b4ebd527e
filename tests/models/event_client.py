"""A client that reads streams of completions, light enough not to be what is measured."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Answer:
    """What came of one request."""

    status: int = 0
    text: str = ""
    finish_reason: str | None = None
    error: str | None = None
    is_done: bool = False
    """Whether the stream ended as streams do."""
    num_events: int = 0
    began_s: float = 0.0
    event_s: list[float] = field(default_factory=list)
    """When something came, seconds after `began_s`."""
    raw: list[bytes] = field(default_factory=list)

    def read(self) -> Answer:
        """Take the text out of what came."""
        if self.status != 200:
            self.error = b"".join(self.raw).decode()
            return self
        for line in _without_sizes(b"".join(self.raw)).split(b"\n"):
            if line == b"data: [DONE]":
                self.is_done = True
            elif line.startswith(b"data: ") and line.endswith(b"}"):
                event = json.loads(line[6:])
                if "error" in event:
                    self.error = event["error"]["message"]
                for choice in event.get("choices", ()):
                    self.text += choice["text"]
                    self.finish_reason = choice["finish_reason"] or self.finish_reason
        self.raw = []
        return self


class Reading(asyncio.Protocol):
    """Keeps what comes on a connection; `left` is done when it has ended, or was left.

    Without the layers of asyncio's streams, which take as long as the server does.
    """

    def __init__(self, answer: Answer, leave_after: int | None) -> None:
        self._answer = answer
        self._leave_after = leave_after
        self._transport: asyncio.BaseTransport | None = None
        self._head: bytes | None = b""  # None once it is whole
        self.left = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        answer = self._answer
        if self._head is not None:
            head, end, data = (self._head + data).partition(b"\r\n\r\n")
            self._head = None if end else head
            if not end:
                return
            answer.status = int(head.split(maxsplit=2)[1])
            if not data:
                return
        answer.raw.append(data)
        answer.event_s.append(time.perf_counter() - answer.began_s)
        answer.num_events += 1
        if answer.num_events == self._leave_after:
            assert self._transport is not None
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if self.left.cancelled():
            return
        if exc is None:
            self.left.set_result(None)
        else:
            self.left.set_exception(exc)


async def ask(
    host: str, port: int, body: dict[str, Any], *, leave_after: int | None = None
) -> Answer:
    """Stream one completion; leave once `leave_after` pieces have come."""
    payload = json.dumps({**body, "stream": True}).encode()
    answer = Answer(began_s=time.perf_counter())
    loop = asyncio.get_running_loop()
    transport, reading = await loop.create_connection(
        lambda: Reading(answer, leave_after), host, port
    )
    transport.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Connection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(payload), payload)
    )
    try:
        await reading.left
    finally:
        transport.close()
    return answer


async def ask_all(
    url: str,
    bodies: Sequence[dict[str, Any]],
    *,
    clients: int,
    leave_after: Sequence[int | None] | None = None,
) -> list[Answer]:
    """Stream all completions, at most `clients` at once, in the order of `bodies`."""
    host, port = url.removeprefix("http://").split(":")
    answers: list[Answer | None] = [None] * len(bodies)
    turn = iter(range(len(bodies)))

    async def client() -> None:
        for i in turn:
            leaving = None if leave_after is None else leave_after[i]
            answers[i] = await ask(host, int(port), bodies[i], leave_after=leaving)

    await asyncio.gather(*(client() for _ in range(clients)))
    return [answer.read() for answer in answers if answer is not None]


def _without_sizes(body: bytes) -> bytes:
    """A chunked body in one piece, as far as it came."""
    pieces = []
    while body:
        size, _, rest = body.partition(b"\r\n")
        length = int(size or b"0", 16)
        if not length:
            break
        pieces.append(rest[:length])
        body = rest[length + 2 :]
    return b"".join(pieces)
