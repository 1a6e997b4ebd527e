"""The same line of a log once a minute: what clients do wrong must not fill a disk."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

_EVERY_S = 60.0


class LogOnce(logging.Filter):
    """Lets each message through once in a while; `clock` tells seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._last_s: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a record is shown.

        Errors are told apart by all that they say; the rest, which clients bring about, by the
        text before anything is filled in.
        """
        now_s = self._clock()
        text = record.getMessage() if record.levelno >= logging.ERROR else str(record.msg)
        if now_s - self._last_s.get(text, -_EVERY_S) < _EVERY_S:
            return False
        if len(self._last_s) > 1_000:
            self.forget()
        self._last_s[text] = now_s
        return True

    def forget(self) -> None:
        """Let every message through once more."""
        self._last_s.clear()


def log_once(*names: str) -> None:
    """Put the filter on these loggers, once."""
    for name in names:
        logger = logging.getLogger(name)
        if not any(isinstance(found, LogOnce) for found in logger.filters):
            logger.addFilter(LogOnce())
