"""Connections: not more than there may be, and none that stands idle for long."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from pagedkv.server.limits import ServerLimits

_LOG = logging.getLogger("pagedkv.server")

_MAX_HEAD_BYTES = 64 << 10
"""Of a request's first line and headers; past it 431."""

_OTHER_FILES = 128
"""Files that a server needs besides its connections."""


def bounded_protocol(limits: ServerLimits) -> type[HttpToolsProtocol]:
    """Uvicorn's protocol with these limits. It would wait for ever for a first request."""
    most = _allowed_connections(limits.max_connections)

    class BoundedProtocol(HttpToolsProtocol):
        """One connection."""

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self._idle_timer: asyncio.TimerHandle | None = None
            self._stuck_timer: asyncio.TimerHandle | None = None
            self._head_bytes = 0

        def connection_made(self, transport: Any) -> None:
            """Take it, or say at once that there are too many."""
            super().connection_made(transport)
            if len(self.connections) > most:
                _LOG.warning("more than %d connections: new ones get 503", most)
                self._refuse(503, b"Service Unavailable", b"Retry-After: 1\r\n")
            else:
                self._start_timer()

        def data_received(self, data: bytes) -> None:
            """Read on, as long as the head of a request has an end."""
            if self.transport.is_closing():
                return
            super().data_received(data)
            # Only of a head that has no end yet: a body came before it on the same connection.
            self._head_bytes = self._head_bytes + len(data) if self._is_in_head else 0
            if self._head_bytes > _MAX_HEAD_BYTES:
                self._refuse(431, b"Request Header Fields Too Large", b"")

        def on_message_begin(self) -> None:
            """A request begins."""
            self._is_in_head = True
            super().on_message_begin()

        def on_headers_complete(self) -> None:
            """A request has said what it wants."""
            self._is_in_head = False
            self._stop_timer()
            super().on_headers_complete()

        def on_response_complete(self) -> None:
            """Until the next request's head is whole it is idle, whatever comes of it."""
            super().on_response_complete()
            if self.cycle.response_complete and not self.transport.is_closing():
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
            """It is gone."""
            self._stop_timer()
            self._stop_stuck_timer()
            super().connection_lost(exc)

        _is_in_head = True

        def _start_timer(self) -> None:
            self._stop_timer()
            self._idle_timer = self.loop.call_later(limits.idle_s, self.transport.close)

        def _stop_timer(self) -> None:
            if self._idle_timer is not None:
                self._idle_timer.cancel()

        def _stop_stuck_timer(self) -> None:
            if self._stuck_timer is not None:
                self._stuck_timer.cancel()

        def _refuse(self, status: int, reason: bytes, header: bytes) -> None:
            self.transport.write(
                b"HTTP/1.1 %d %s\r\n%sContent-Length: 0\r\nConnection: close\r\n\r\n"
                % (status, reason, header)
            )
            self.transport.close()

    return BoundedProtocol


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
