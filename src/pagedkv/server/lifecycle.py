"""A server's life: it starts, serves, drains and ends."""

from __future__ import annotations

import asyncio
import logging
import math
import signal
import socket
from collections.abc import Callable, Sequence
from types import FrameType

import uvicorn

from pagedkv.errors import InvalidInput
from pagedkv.server.access_log import AccessLog, Noted
from pagedkv.server.app import create_app
from pagedkv.server.connections import bounded_protocol
from pagedkv.server.cross_origin import open_to
from pagedkv.server.errors import BrokenOff
from pagedkv.server.guard import Guard
from pagedkv.server.log_once import log_once
from pagedkv.server.memory_page.watch import MemoryWatch
from pagedkv.server.prompts import PromptReader
from pagedkv.server.serving import Serving

IDLE_S = 1.0
"""How often it is asked whether nobody is served, so that the laws can be checked."""


def listen(host: str, port: int) -> socket.socket:
    """A socket for the server; port 0 takes any free one. Raises `InvalidInput`, one line."""
    try:
        [family, kind, protocol, _, address], *_ = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        made = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as problem:
        raise InvalidInput(f"host is {host!r}: {_why(problem)}") from None
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
    except OSError as problem:
        made.close()
        raise InvalidInput(f"cannot listen on {host}:{port}: {_why(problem)}") from None
    return made


class Server(uvicorn.Server):
    """Uvicorn, but a first signal makes it drain: what runs may finish, what comes gets 503.

    `listener` is a bound socket, see `listen`. `api_keys` are what clients must show one of.
    `allow_origins` are those whose pages may use it, see `cross_origin`. `drain_s` is how long what
    runs may take to finish. `announce` is told where it listens, `access_log` a line for each
    request that is over. Raises `InvalidInput`.
    """

    def __init__(
        self,
        serving: Serving,
        *,
        listener: socket.socket,
        api_keys: Sequence[str] = (),
        allow_origins: Sequence[str] = (),
        drain_s: float = 25.0,
        announce: Callable[[str], object] | None = None,
        access_log: Callable[[str], object] | None = None,
    ) -> None:
        app = create_app(serving)
        self._reader: PromptReader = app.state.reader
        self._watch: MemoryWatch = app.state.watch
        self._guard = Guard(
            app, keys=api_keys, limits=serving.limits, on_refusal=serving.count_refusal
        )
        log = None
        if access_log is not None:
            paths = frozenset(getattr(route, "path", "") for route in app.routes)
            log = AccessLog(access_log, paths=paths)
        # Within the first the refusals of the others bear an id, within the second pages can read
        # those of the guard.
        noted = Noted(open_to(self._guard, allow_origins), log=log)
        super().__init__(
            uvicorn.Config(
                noted,
                http=bounded_protocol(serving.limits, log=log, on_refusal=serving.count_refusal),
                timeout_keep_alive=math.ceil(serving.limits.idle_s),
                ws="none",
                log_config=None,
                log_level=logging.WARNING,
                access_log=False,
                lifespan="off",
                server_header=False,
                timeout_graceful_shutdown=1,
            )
        )
        self._serving = serving
        self._drain_s = drain_s
        self._listener = listener
        self._announce = announce
        self._draining: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until a signal comes and those who are served have gone."""
        self._loop = asyncio.get_running_loop()
        log_once("uvicorn.error", "pagedkv.server")
        self._serving.start()
        tasks = [
            asyncio.create_task(self._serving.verify_when_idle(IDLE_S)),
            asyncio.create_task(self._serving.remind_silent_streams()),
            asyncio.create_task(self._watch.keep_history()),
        ]
        try:
            await super().serve([self._listener])
        finally:
            self._reader.close()
            for task in tasks:
                task.cancel()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and say where."""
        await super().startup(sockets)
        if self._announce is not None and self.started:
            self._announce(f"serving {self._serving.model_name} at {self.url}")

    @property
    def url(self) -> str:
        """Where it listens."""
        host, port = self._listener.getsockname()[:2]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal came: the first drains, the second ends."""
        if self._loop is None:
            self.should_exit = True
        elif not self._serving.is_draining:
            self._loop.call_soon_threadsafe(self.drain)
        else:
            self.should_exit = True
            self.force_exit = sig == signal.SIGINT
            self._loop.call_soon_threadsafe(self._end)

    def drain(self) -> None:
        """Let nobody in any more, and end when all have gone, or after the time for it."""
        self._serving.is_draining = True
        if self._announce is not None and self._is_busy:
            self._announce(
                f"draining: answers under way have {self._drain_s:g} s to end; another signal ends "
                "them now"
            )
        self._draining = asyncio.get_running_loop().create_task(self._drain())

    async def _drain(self) -> None:
        deadline = asyncio.get_running_loop().time() + self._drain_s
        while self._is_busy and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.02)
        self._end()

    def _end(self) -> None:
        """Tell whoever waits that it ends now."""
        self._reader.close()
        self._serving.break_off_all(BrokenOff.shutting_down())
        self.should_exit = True

    @property
    def _is_busy(self) -> bool:
        """Whether anybody waits or reads: prompts that are no token ids yet count as well."""
        return self._serving.is_busy or self._guard.num_asking > 0


def _why(problem: OSError | UnicodeError) -> str:
    return getattr(problem, "strerror", None) or str(problem)
