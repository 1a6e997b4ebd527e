"""Connections: not more than there may be, none that stands idle for long, and what is answered
before any application sees a request.
"""

from __future__ import annotations

import asyncio
import http
import logging
from collections import deque
from collections.abc import Callable
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from pagedkv.server.access_log import HEADER, UNKNOWN, AccessLog, RequestNote
from pagedkv.server.errors import ApiError
from pagedkv.server.limits import ServerLimits

_LOG = logging.getLogger("pagedkv.server")

_MAX_HEAD_BYTES = 64 << 10
"""Of a request's first line and headers; past it 431."""

_UPGRADE = b"upgrade"

_OTHER_FILES = 128
"""Files that a server needs besides its connections."""

_MOST_REFUSED = 64
"""Connections that are refused and not closed yet; past it they are closed without further ado."""

_REFUSED_S = 1.0
"""How long a client that is refused has to read that, and to close its connection: one that is
closed with something unread is reset, and its client may never see what it was told."""


def bounded_protocol(
    limits: ServerLimits,
    *,
    log: AccessLog | None = None,
    on_refusal: Callable[[ApiError], object] | None = None,
) -> type[HttpToolsProtocol]:
    """Uvicorn's protocol with these limits. It would wait for ever for a first request.

    `log` has a line for each request that is refused here, which `on_refusal` is told.
    """
    most = _allowed_connections(limits.max_connections)
    refused: set[asyncio.Protocol] = set()

    class BoundedProtocol(HttpToolsProtocol):
        """One connection."""

        parser: httptools.HttpRequestParser

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self._idle_timer: asyncio.TimerHandle | None = None
            self._stuck_timer: asyncio.TimerHandle | None = None
            self._head_bytes = 0
            self._is_in_head = True
            self._is_one_head = True
            """Whether nothing but this head came in what is being read."""
            self._is_in_body = False
            """Whether what is being read has a part of a body in it."""
            self._trailer_bytes = 0  # that came since then and are no head either
            self._is_offered_another = False
            self.url = b""
            self.headers: list[tuple[bytes, bytes]] = []
            self._begun_s = self.loop.time()
            self._cycles: deque[RequestResponseCycle] = deque()
            """Requests whose heads are whole and that are not answered, as they came."""
            self._refusal: ApiError | None = None
            """What came last is refused with, and nothing more is read."""

        def connection_made(self, transport: Any) -> None:
            """Take it, or say at once that there are too many."""
            super().connection_made(transport)
            if len(self.connections) > most:
                _LOG.warning("more than %d connections: new ones get 503", most)
                self._refuse_in_turn(
                    ApiError(
                        503,
                        f"{most} connections are open already",
                        code="too_many_connections",
                        retry_after_s=1,
                    )
                )
            else:
                self._start_timer()

        def data_received(self, data: bytes) -> None:
            """Read on, as long as the head of a request has an end."""
            if self.transport.is_closing() or self._refusal is not None:
                return
            self._unset_keepalive_if_required()
            while data and self._refusal is None:
                room = _MAX_HEAD_BYTES - self._head_bytes if self._is_in_head else len(data)
                if room == 0:
                    self._refuse_in_turn(_head_too_large())
                    return
                part, data = data[:room], data[room:]
                self._is_one_head = self._is_in_head
                self._is_in_body = False
                self._read(part)
                is_trailer = not (self._is_in_head or self._is_in_body)
                self._trailer_bytes = self._trailer_bytes + len(part) if is_trailer else 0
                if self._trailer_bytes > _MAX_HEAD_BYTES and self._refusal is None:
                    self._refuse_in_turn(_head_too_large())
                # What came with something before it is not counted: where it began is not known.
                self._head_bytes = self._head_bytes + len(part) if self._is_one_head else 0

        def _read(self, data: bytes) -> None:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as ended:
                if self._is_offered_another:
                    self._decline(data[ended.args[0] :])
            except httptools.HttpParserError:
                _LOG.warning("something came that is no HTTP: it gets 400")
                self._refuse_in_turn(ApiError(400, "this is no HTTP request: it cannot be read"))

        def _decline(self, rest: bytes) -> None:
            """Read a request on that would rather go on in another protocol, as HTTP/2.

            The parser leaves the rest, its body too, to whoever speaks that. So another parser
            reads it, from a head without the offer. Java's client makes one to whoever it meets.
            """
            self._is_offered_another = False
            line = b"%s %s HTTP/%s\r\n" % (
                self.parser.get_method(),
                self.url,
                self.parser.get_http_version().encode(),
            )
            kept = (b"%s: %s\r\n" % header for header in self.headers if header[0] != _UPGRADE)
            self.parser = httptools.HttpRequestParser(self)
            self._read(b"".join([line, *kept, b"\r\n", rest]))

        def on_message_begin(self) -> None:
            """A request begins."""
            self._is_in_head = True
            self._begun_s = self.loop.time()
            super().on_message_begin()

        def on_header(self, name: bytes, value: bytes) -> None:
            """A header. One that comes behind a body says nothing of the request any more."""
            if self._is_in_head:
                super().on_header(name, value)

        def on_body(self, body: bytes) -> None:
            """A part of a body has come."""
            self._is_in_body = True
            super().on_body(body)

        def on_headers_complete(self) -> None:
            """A request has said what it wants."""
            if self.parser.should_upgrade() and any(name == _UPGRADE for name, _ in self.headers):
                self._is_offered_another = True
                return
            super().on_headers_complete()
            self._is_in_head = self._is_one_head = False
            self._stop_timer()
            self._cycles.append(self.cycle)
            if self.parser.get_http_version() < "1.1":
                _end_where_the_connection_does(self.cycle)

        def on_message_complete(self) -> None:
            """A request is whole, but for one that is to be read once more."""
            if not self._is_offered_another:
                self._is_in_head = True
                super().on_message_complete()

        def on_response_complete(self) -> None:
            """Until the next request's head is whole it is idle, whatever comes of it."""
            self._cycles.popleft()
            super().on_response_complete()
            if self._cycles or self.transport.is_closing():
                return
            if self._refusal is not None:
                self._refuse(self._refusal)
            else:
                self._start_timer()

        def pause_writing(self) -> None:
            """The client does not read as fast as it is written to."""
            super().pause_writing()
            self._stuck_timer = self.loop.call_later(limits.stuck_s, self.transport.abort)

        def resume_writing(self) -> None:
            """It reads again."""
            self._stop_stuck_timer()
            super().resume_writing()

        def connection_lost(self, exc: Exception | None) -> None:
            """It is gone, and so is whoever waits for an answer, the last one and those before."""
            self._stop_timer()
            self._stop_stuck_timer()
            refused.discard(self)
            for cycle in self._cycles:
                cycle.disconnected = True
                cycle.message_event.set()
            super().connection_lost(exc)

        def _start_timer(self) -> None:
            self._stop_timer()
            self._idle_timer = self.loop.call_later(limits.idle_s, self.transport.close)

        def _stop_timer(self) -> None:
            if self._idle_timer is not None:
                self._idle_timer.cancel()

        def _stop_stuck_timer(self) -> None:
            if self._stuck_timer is not None:
                self._stuck_timer.cancel()

        def _refuse_in_turn(self, error: ApiError) -> None:
            """Refuse what came last, when all that came before it is answered."""
            self._refusal = error
            if self._cycles and self._cycles[-1].more_body:
                # It is the body that is wrong, of a request that waits for its turn, or not.
                broken = self._cycles.pop()
                if self._cycles:
                    self.pipeline.popleft()
                else:
                    self._cut_off(broken, error)
            elif not self._cycles:
                self._refuse(error)

        def _refuse(self, error: ApiError) -> None:
            """Answer on the connection itself: no application knows of the request."""
            note = RequestNote(self.headers)
            self._write(error, note)
            if on_refusal is not None:
                on_refusal(error)
            if log is not None:
                # The path is whole when a header has come.
                path = self.url.partition(b"?")[0] if self.headers else b""
                log.tell(
                    note,
                    method=self.parser.get_method().decode() if self.url else UNKNOWN,
                    path=path.decode("latin-1"),
                    status=error.status,
                    duration_s=self.loop.time() - self._begun_s,
                )

        def _cut_off(self, cycle: RequestResponseCycle, error: ApiError) -> None:
            """Answer in place of the application, which finds that its client has left."""
            if cycle.response_started:
                self.transport.close()
            else:
                state = cycle.scope.setdefault("state", {})
                self._write(error, state.setdefault("note", RequestNote(self.headers)))
            cycle.disconnected = True
            cycle.message_event.set()

        def _write(self, error: ApiError, note: RequestNote) -> None:
            """Write the whole answer, and close the connection when it was read."""
            response = error.response()
            response.headers["Connection"] = "close"
            response.headers[HEADER.decode()] = note.id
            line = f"HTTP/1.1 {error.status} {http.HTTPStatus(error.status).phrase}\r\n"
            headers = (b"%s: %s\r\n" % header for header in response.raw_headers)
            self.transport.write(b"".join([line.encode(), *headers, b"\r\n", bytes(response.body)]))
            self._stop_timer()
            self.connections.discard(self)
            if len(refused) >= _MOST_REFUSED or not self.transport.can_write_eof():
                self.transport.close()
                return
            refused.add(self)
            self.transport.write_eof()
            self._idle_timer = self.loop.call_later(_REFUSED_S, self.transport.close)

    return BoundedProtocol


def _head_too_large() -> ApiError:
    return ApiError(
        431,
        f"the head of a request may have {_MAX_HEAD_BYTES:,} bytes",
        code="head_too_large",
    )


def _end_where_the_connection_does(cycle: RequestResponseCycle) -> None:
    """Let an answer of no known length go without chunks, which HTTP/1.0 has not."""
    send = cycle.send
    has_no_length = False

    async def send_plainly(message: Any) -> None:
        nonlocal has_no_length
        if message["type"] == "http.response.start":
            names = [name.lower() for name, _ in message.get("headers", ())]
            has_no_length = b"content-length" not in names
            if has_no_length:
                cycle.chunked_encoding = False
        elif has_no_length:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    cycle.send = send_plainly


def _allowed_connections(wanted: int) -> int:
    """As many as are wanted and as the system gives this process files for."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return wanted
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < wanted + _OTHER_FILES:
        most = wanted + _OTHER_FILES
        soft = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return max(min(wanted, soft - _OTHER_FILES), 1)
