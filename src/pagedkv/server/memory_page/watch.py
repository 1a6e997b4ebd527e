"""`MemoryWatch`: looks at the memory ten times a second, while somebody watches.

After each step the engine's thread calls in. It notes what the step did, and where a look is due
by the clock it compares the memory with what was told (`changes`). The rest happens in the event
loop, once for all who watch: one message for all, and each has a mailbox. Now and then the loop
takes the look that no step has come to take, because nobody generates.

While nobody watches there is only a sample of a few counters once a second, so that who comes sees
the minutes before.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pagedkv.scheduling.continuous import Scheduler
from pagedkv.scheduling.limits import SchedulerConfig
from pagedkv.server.errors import ApiError
from pagedkv.server.memory_page.changes import Changes, Differ
from pagedkv.server.memory_page.happenings import HAPPENING_FIELDS, Happenings
from pagedkv.server.memory_page.history import History
from pagedkv.server.memory_page.message import message
from pagedkv.server.memory_page.twin import Twin

if TYPE_CHECKING:
    from pagedkv.engine.core import Engine
    from pagedkv.server.serving import Serving

_LOG = logging.getLogger("pagedkv.server")

INTERVAL_S = 0.1
"""Between two looks."""

IDLE_INTERVAL_S = 1.0
"""Between two looks while nothing happens."""

_ROUND_S = 0.2
"""Between two times at which the event loop sees to that. Each of them wakes it."""

LINGER_S = 10.0
"""After the last watcher has left, until all that was told is forgotten: a page that is loaded anew
finds the sequences by the same names. There are no looks meanwhile."""

_LATE_S = 0.5
"""How long a sample is left for a step to take before the event loop does."""

MAX_WATCHERS = 16
"""Open pages; past it 429."""

_MAILBOX_SIZE = 20
"""Messages that a slow reader may be behind; past it the whole is sent anew."""


@dataclass(frozen=True)
class _Look:
    """What one look found, on its way to the event loop."""

    now_s: float
    changes: Changes
    whole: Changes | None
    """All that is told by now, where somebody needs it who knows nothing."""
    happenings: NDArray[np.int32]
    counters: dict[str, int]


class Watcher:
    """One open page: a mailbox of messages."""

    def __init__(self) -> None:
        self.mailbox: deque[bytes] = deque()
        self.is_behind = True
        """Whether it needs the whole before any more changes."""
        self.is_over = False
        self.news = asyncio.Event()


class MemoryWatch:
    """Watches the memory of `serving` for any number of open pages."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._watchers: set[Watcher] = set()
        self._looking: asyncio.Task[None] | None = None
        self._session: _Session | None = None
        self._history = History()
        serving.llm.watch(self._after_step)

    async def messages(self) -> AsyncIterator[bytes]:
        """Messages for one page, until the server drains; `check_open` comes before.

        The first has kind `whole`, and so has one after which a slow reader goes on.
        """
        watcher = Watcher()
        self._begin(watcher)
        try:
            while not watcher.is_over:
                await watcher.news.wait()
                watcher.news.clear()
                while watcher.mailbox:
                    yield watcher.mailbox.popleft()
        finally:
            self._watchers.discard(watcher)

    def check_open(self) -> None:
        """Raise `ApiError` 429 where as many watch as may."""
        if len(self._watchers) >= MAX_WATCHERS:
            raise ApiError(
                429,
                f"{MAX_WATCHERS} pages watch the memory already",
                code="too_many_watchers",
                retry_after_s=10,
            )

    async def keep_history(self) -> None:
        """Go on taking the samples that no step has come to take. For a task."""
        while True:
            wait_s = self._history.due_s + _LATE_S - time.perf_counter()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            else:
                await self._serving.between_steps(
                    lambda engine: self._sample(engine, time.perf_counter())
                )

    def _begin(self, watcher: Watcher) -> None:
        self._watchers.add(watcher)
        if self._session is not None:
            self._session.want_whole()
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look_on())

    async def _look_on(self) -> None:
        """Look again and again, until nobody has watched for a while."""
        loop = asyncio.get_running_loop()
        try:
            await asyncio.to_thread(_compile)
            self._session = await self._serving.between_steps(
                lambda engine: _Session(engine, self._serving, self._history, loop, self._deliver)
            )
            session = self._session
            left_s: float | None = None
            while not (self._serving.is_draining or session.has_failed):
                if self._watchers:
                    left_s = None
                    session.is_awake = True
                    if session.is_late:
                        await self._serving.between_steps(session.look_if_late)
                else:
                    session.is_awake = False
                    left_s = loop.time() if left_s is None else left_s
                    if loop.time() - left_s > LINGER_S:
                        break
                await asyncio.sleep(_ROUND_S)
        finally:
            self._session = None
            for watcher in self._watchers:
                watcher.is_over = True
                watcher.news.set()

    def _after_step(self, engine: Engine) -> None:
        """Called in the engine's thread after each step, and when orders were taken."""
        now_s = time.perf_counter()
        if now_s >= self._history.due_s:
            self._sample(engine, now_s)
        session = self._session
        if session is not None:
            session.after_step(engine, now_s)

    def _sample(self, engine: Engine, now_s: float) -> None:
        """Take the sample of this second, unless a step has just done it. Does not raise."""
        if now_s < self._history.due_s:
            return
        try:
            self._history.note(now_s, _counters(engine))
        except Exception as failure:
            self._history.due_s = math.inf
            _LOG.error("the memory page's history ends: %s", failure, exc_info=failure)

    def _deliver(self, session: _Session, look: _Look) -> None:
        """Put the news into all mailboxes. In the event loop."""
        news = session.told(look)
        whole = session.whole(look)
        for watcher in self._watchers:
            if len(watcher.mailbox) >= _MAILBOX_SIZE:
                watcher.mailbox.clear()
                watcher.is_behind = True
            if not watcher.is_behind:
                watcher.mailbox.append(news)
            elif whole is not None:
                watcher.mailbox.append(whole)
                watcher.is_behind = False
            else:
                session.want_whole()
            watcher.news.set()


class _Session:
    """From the first watcher that comes until some time after the last one has left."""

    def __init__(
        self,
        engine: Engine,
        serving: Serving,
        history: History,
        loop: asyncio.AbstractEventLoop,
        deliver: Callable[[_Session, _Look], None],
    ) -> None:
        scheduler = engine.scheduler
        num_slots = scheduler.num_blocks * scheduler.block_size
        seats = scheduler.config.max_num_seqs
        self._loop = loop
        self._began_s = time.perf_counter()
        self._num_steps = scheduler.num_concluded
        self._looked_s = 0.0
        self.is_awake = False
        """Whether anybody watches."""
        self._is_stirred = True  # anything happened since the last look
        self._is_whole_wanted = True
        self.has_failed = False
        self._deliver = deliver
        self._differ = Differ(scheduler.arrays)
        self._happenings = Happenings()
        self._twins = {
            "longest": Twin(num_slots, max_regions=seats, longest=scheduler.max_model_len),
            "limit": Twin(num_slots, max_regions=seats, longest=None),
        }
        self._newest_name = 0
        self._history = history
        self._sampled_s = self._began_s
        self._facts = {
            "model": serving.model_name,
            "num_blocks": scheduler.num_blocks,
            "block_size": scheduler.block_size,
            "max_model_len": scheduler.max_model_len,
            "max_num_seqs": seats,
            "block_bytes": serving.llm.budget.block_bytes,
        }

    def want_whole(self) -> None:
        """Somebody knows nothing: look soon, and tell everything."""
        self._is_whole_wanted = True

    @property
    def is_late(self) -> bool:
        """Whether there should have been a look that no step has taken.

        Steps that come more often than looks are due are left to take them.
        """
        waited_s = time.perf_counter() - self._looked_s
        most_s = 2 * INTERVAL_S if self._is_stirred else IDLE_INTERVAL_S
        return self._is_whole_wanted or waited_s >= most_s

    def after_step(self, engine: Engine, now_s: float) -> None:
        """Note what the step did, and look where a look is due. Does not raise."""
        if not self.is_awake:
            return
        self._is_stirred = True
        scheduler = engine.scheduler
        try:
            if Happenings.are_any(scheduler.newest_plan):
                # Not those scheduled: one that is begun ahead has done nothing yet, and the last
                # of all ends without another.
                if scheduler.num_concluded != self._num_steps:
                    self._happenings.note(scheduler.arrays)
                self._num_steps = scheduler.num_concluded
        except Exception as failure:
            self._fail(failure)
        if now_s - self._looked_s >= INTERVAL_S:
            self._look_and_send(engine)

    def look_if_late(self, engine: Engine) -> None:
        """Look, unless a step has just done it."""
        if self.is_late:
            self._look_and_send(engine)

    def _look_and_send(self, engine: Engine) -> None:
        """Look; what is found goes to the event loop. Does not raise."""
        if self.has_failed:
            return
        self._is_stirred = False
        self._looked_s = time.perf_counter()
        try:
            look = self._look(engine)
        except Exception as failure:
            self._fail(failure)
            return
        with contextlib.suppress(RuntimeError):  # the loop was closed: nobody watches
            self._loop.call_soon_threadsafe(self._deliver, self, look)

    def told(self, look: _Look) -> bytes:
        """The message with what is new."""
        arrays = {**_named(look.changes), "happenings": look.happenings}
        for name in self._follow(look.changes.sequences):
            arrays[f"regions_{name}"] = self._twins[name].rows
        now_s = self._began_s + look.now_s
        arrays["samples"] = self._history.samples(now_s, after_s=self._sampled_s)
        self._sampled_s = now_s
        return message(self._now("changes", look), arrays)

    def _follow(self, changed: NDArray[np.int32]) -> list[str]:
        """Let the twins follow where sequences came or ended; returns whose regions are others."""
        # Those that ended are the first, and the last is the newest.
        if not len(changed) or (changed[0, 1] > 0 and changed[-1, 1] <= self._newest_name):
            return []
        self._newest_name = max(self._newest_name, int(changed[-1, 1]))
        return [name for name, twin in self._twins.items() if twin.follow(changed)]

    def whole(self, look: _Look) -> bytes | None:
        """The message with everything, for a page that knows nothing, where it was wanted.

        What is new is in it already: `told` comes before.
        """
        if look.whole is None:
            return None
        arrays = _named(look.whole)
        arrays["happenings"] = np.empty((0, len(HAPPENING_FIELDS)), dtype=np.int32)
        for name, twin in self._twins.items():
            arrays[f"regions_{name}"] = twin.rows
        arrays["samples"] = self._history.samples(self._began_s + look.now_s)
        return message({**self._now("whole", look), "memory": self._facts}, arrays)

    def _now(self, kind: str, look: _Look) -> dict[str, Any]:
        twins = {
            name: {"waiting": twin.waiting_columns, "is_blocked": twin.is_blocked}
            for name, twin in self._twins.items()
        }
        return {"kind": kind, "now_s": look.now_s, "counters": look.counters, "twins": twins}

    def _look(self, engine: Engine) -> _Look:
        scheduler = engine.scheduler
        arrays = scheduler.arrays
        now_s = time.perf_counter() - self._began_s
        # Before the look: names go by the order of coming.
        happenings = self._happenings.taken(self._differ.names(arrays))
        changes = self._differ.look(
            arrays, block_size=scheduler.block_size, now_ms=int(now_s * 1000) + 1
        )
        whole = None
        if self._is_whole_wanted:
            self._is_whole_wanted = False
            whole = self._differ.whole()
        return _Look(now_s, changes, whole, happenings, _counters(engine))

    def _fail(self, failure: Exception) -> None:
        """End the watching; the engine goes on."""
        self.has_failed = True
        _LOG.error("watching the memory failed: %s", failure, exc_info=failure)


def _counters(engine: Engine) -> dict[str, int]:
    """What the page is told in figures."""
    statistics = engine.statistics()
    memory = statistics.memory
    return {
        "num_blocks": memory.num_blocks,
        "block_size": memory.block_size,
        "used_blocks": memory.used_blocks,
        "shared_blocks": memory.shared_blocks,
        "cached_blocks": memory.cached_blocks,
        "free_blocks": memory.free_blocks,
        "table_entries": memory.table_entries,
        "held_tokens": memory.held_tokens,
        "num_running": memory.num_running,
        "num_waiting": memory.num_waiting,
        "num_steps": memory.num_steps,
        "query_tokens": memory.query_tokens,
        "hit_tokens": memory.hit_tokens,
        "preemptions": memory.preemptions,
        "evicted_blocks": memory.evicted_blocks,
        "output_tokens": statistics.output_tokens,
    }


def _named(changes: Changes) -> dict[str, NDArray[Any]]:
    return dict(changes._asdict())


def _compile() -> None:
    """Have compiled code at hand before the engine has to wait for it."""
    config = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=8)
    scheduler = Scheduler(4, config, block_size=2, max_model_len=6)
    differ, happenings = Differ(scheduler.arrays), Happenings()
    scheduler.add([1, 2, 3], max_new_tokens=2)
    scheduler.schedule()
    scheduler.commit([4])
    happenings.note(scheduler.arrays)
    happenings.taken(differ.names(scheduler.arrays))
    changes = differ.look(scheduler.arrays, block_size=2, now_ms=1)
    twin = Twin(8, max_regions=2, longest=None)
    twin.follow(changes.sequences)
    assert len(twin.rows) == 1
