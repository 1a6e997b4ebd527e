"""An id for each request, which its answer bears, and a line that says how it went.

A line has no text of anybody's: of a path that is none of the server's own there is nothing in it.
"""

from __future__ import annotations

import datetime
import logging
import re
import time
import uuid
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

_LOG = logging.getLogger("pagedkv.server")

HEADER = b"x-request-id"

UNKNOWN = "-"

LEFT = 499
"""Where a client left before its answer was whole: nginx's number."""

_WELL_FORMED = re.compile(rb"[A-Za-z0-9._:@/+=-]{1,128}")
"""What of a client's is told back and written into logs: nothing that could begin a line."""


@dataclass(frozen=True)
class Outcome:
    """What has come of a request that was for answers."""

    prompt_tokens: int
    output_tokens: int
    has_left: bool
    """Whether its client left before the end."""


class RequestNote:
    """What is known of one request with these headers; `request.state.note` of its endpoint."""

    def __init__(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        self._sent_id = _sent_id(headers)
        self._answer_id: str | None = None
        self.outcome: Callable[[], Outcome] | None = None
        """Tells what has come of it, when it is over; None where no answer was begun."""

    def name(self, answer_id: str) -> None:
        """Its answer has an id, by which it is called unless its client has given it one."""
        self._answer_id = answer_id

    @property
    def id(self) -> str:
        """What it is called."""
        if self._answer_id is None:
            self._answer_id = f"req-{uuid.uuid4().hex}"
        return self._sent_id or self._answer_id


class AccessLog:
    """Writes a line for each request that is over.

    `write` is given each line. Of paths only those of the server, `paths`, are told.
    """

    def __init__(
        self,
        write: Callable[[str], object],
        *,
        paths: Container[str],
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._write: Callable[[str], object] | None = write
        self._paths = paths
        self._wall_clock = wall_clock

    def tell(
        self,
        note: RequestNote,
        *,
        method: str,
        path: str,
        route: str = UNKNOWN,
        status: int | None,
        duration_s: float,
    ) -> None:
        """Write a line. `route` is told for a path that has a name in it, or something else.

        Where none can be written any more that is said, and it goes on without.
        """
        if self._write is None:
            return
        outcome = note.outcome() if note.outcome is not None else None
        now = datetime.datetime.fromtimestamp(self._wall_clock(), datetime.UTC)
        fields = {
            "time": now.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "id": note.id,
            "method": method,
            "path": path if path in self._paths else route,
            "status": LEFT if outcome is not None and outcome.has_left else status or UNKNOWN,
        }
        if outcome is not None:
            fields["tokens_in"] = outcome.prompt_tokens
            fields["tokens_out"] = outcome.output_tokens
        fields["duration_s"] = f"{duration_s:.3f}"
        try:
            self._write(" ".join(f"{name}={value}" for name, value in fields.items()))
        except OSError as problem:
            self._write = None
            _LOG.error("the access log ends here, it cannot be written: %s", problem)


class Noted:
    """An application around another one, whose answers all bear the id of their request.

    `log` has a line of each when it is over.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        log: AccessLog | None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._app = app
        self._log = log
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # There is one where the request was answered before this was called.
        note = scope.setdefault("state", {}).setdefault("note", RequestNote(scope["headers"]))
        begun_s = self._clock()
        status: int | None = None

        async def send_named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                named = (HEADER, note.id.encode())
                message = {**message, "headers": [*message.get("headers", ()), named]}
            await send(message)

        try:
            await self._app(scope, receive, send_named)
        finally:
            if self._log is not None:
                self._log.tell(
                    note,
                    method=scope["method"],
                    path=scope["path"],
                    route=getattr(scope.get("route"), "path", UNKNOWN),
                    status=status,
                    duration_s=self._clock() - begun_s,
                )


def _sent_id(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """What the client calls its request, if it is well-formed."""
    for name, value in headers:
        if name == HEADER:
            return value.decode() if _WELL_FORMED.fullmatch(value) else None
    return None
