"""The memory page on a scheduler without a model, which stands still unless a test moves it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import uvicorn
from fastapi import FastAPI

from pagedkv.scheduling.continuous import Batch, Scheduler
from pagedkv.scheduling.limits import SchedulerConfig
from pagedkv.server.errors import ApiError, answer_api_error
from pagedkv.server.guard import Guard
from pagedkv.server.limits import ServerLimits
from pagedkv.server.memory_page.endpoints import add_memory_page


class StillServer:
    """`scheduler` is the memory that is watched; `step` moves it on by one step."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        max_model_len: int = 64,
        seats: int = 8,
        keys: tuple[str, ...] = (),
    ) -> None:
        config = SchedulerConfig(max_num_seqs=seats, max_num_batched_tokens=4096, watermark=0.0)
        self.scheduler = Scheduler(
            num_blocks, config, block_size=block_size, max_model_len=max_model_len, secret=bytes(16)
        )
        self.output_tokens = 0
        self.watchers: list[Callable[[Any], None]] = []
        self.lock = threading.Lock()
        # What the page asks of a `Serving`, and of the engine that this shows it.
        self.llm = SimpleNamespace(
            watch=self.watchers.append, budget=SimpleNamespace(block_bytes=4096)
        )
        self.model_name = "still"
        self.is_draining = False
        app = FastAPI()
        app.add_exception_handler(ApiError, answer_api_error)
        self.watch = add_memory_page(app, self)  # type: ignore[arg-type]
        guarded = Guard(app, keys=keys, limits=ServerLimits())
        self._server = uvicorn.Server(
            uvicorn.Config(guarded, port=0, log_level="error", lifespan="off", ws="none")
        )
        self._server.config.timeout_graceful_shutdown = 1

    async def between_steps(self, look: Callable[[Any], Any]) -> Any:
        """As `Serving` has it."""
        with self.lock:
            return look(self)

    def statistics(self) -> Any:
        """As `Engine` has it."""
        return SimpleNamespace(memory=self.scheduler.statistics(), output_tokens=self.output_tokens)

    def step(self, token: int = 7) -> Batch:
        """Everybody who is due a token says `token`."""
        with self.lock:
            batch = self.scheduler.schedule()
            self.scheduler.commit(np.full(len(batch.due), token))
            self.output_tokens += len(batch.due)
            self.tell()
        return batch

    def tell(self) -> None:
        """Call the watchers, as after a step."""
        for watcher in self.watchers:
            watcher(self)

    @property
    def url(self) -> str:
        """Where it listens."""
        host, port = self._server.servers[0].sockets[0].getsockname()
        return f"http://{host}:{port}"

    @contextlib.contextmanager
    def running(self) -> Iterator[StillServer]:
        """It serves within."""
        thread = threading.Thread(target=self._server.run, daemon=True)
        thread.start()
        while not self._server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        try:
            yield self
        finally:
            self.is_draining = True
            self._server.should_exit = True
            thread.join(60)
            assert not thread.is_alive()
