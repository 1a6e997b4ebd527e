"""A server's life: it starts, serves, drains and ends."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Sequence
from types import FrameType

import uvicorn

from pagedkv.server.app import create_app
from pagedkv.server.errors import ApiError
from pagedkv.server.serving import Serving

HANGING_ON_S = 0.5
"""Time for clients to read that they were broken off."""


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
                create_app(serving),
                host=host,
                port=port,
                log_level="warning",
                access_log=False,
                lifespan="off",
                server_header=False,
                timeout_graceful_shutdown=max(int(HANGING_ON_S), 1),
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
        self._serving.start()
        await super().serve(sockets)

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
