"""A server's life: it starts, serves, drains and ends."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Sequence
from types import FrameType

import uvicorn

from pagedkv.server.app import create_app
from pagedkv.server.connections import bounded_protocol
from pagedkv.server.errors import ApiError
from pagedkv.server.guard import Guard
from pagedkv.server.log_once import log_once
from pagedkv.server.serving import Serving

IDLE_S = 1.0
"""How often it is asked whether nobody is served, so that the laws can be checked."""


class Server(uvicorn.Server):
    """Uvicorn, but a first signal makes it drain: what runs may finish, what comes gets 503."""

    def __init__(
        self,
        serving: Serving,
        *,
        host: str = "127.0.0.1",
        port: int = 8000,
        api_keys: Sequence[str] = (),
        drain_s: float = 30.0,
        announce: Callable[[str], object] | None = None,
    ) -> None:
        super().__init__(
            uvicorn.Config(
                Guard(create_app(serving), keys=api_keys, limits=serving.limits),
                http=bounded_protocol(serving.limits),
                ws="none",
                host=host,
                port=port,
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
        self._announce = announce
        self._draining: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def serve(self, sockets: list[object] | None = None) -> None:
        """Serve until a signal comes and those who are served have gone."""
        self._loop = asyncio.get_running_loop()
        log_once("uvicorn.error", "pagedkv.server")
        self._serving.start()
        verifying = asyncio.create_task(self._serving.verify_when_idle(IDLE_S))
        try:
            await super().serve(sockets)
        finally:
            verifying.cancel()

    async def startup(self, sockets: list[object] | None = None) -> None:
        """Listen, and say where."""
        await super().startup(sockets)
        if self._announce is not None and self.started:
            self._announce(f"serving {self._serving.model_name} at {self.url}")

    @property
    def url(self) -> str:
        """Where it listens."""
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal came: the first drains, the second ends."""
        if self._loop is not None and not self._serving.is_draining:
            self._loop.call_soon_threadsafe(self.drain)
        elif sig == signal.SIGINT:
            self.should_exit = self.force_exit = True
        else:
            self.should_exit = True

    def drain(self) -> None:
        """Let nobody in any more, and end when all have gone, or after the time for it."""
        self._serving.is_draining = True
        self._draining = asyncio.get_running_loop().create_task(self._drain())

    async def _drain(self) -> None:
        deadline = asyncio.get_running_loop().time() + self._drain_s
        while self._serving.exchanges and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.02)
        self._serving.break_off_all(
            ApiError(503, "the server is shutting down", code="shutting_down")
        )
        self.should_exit = True
