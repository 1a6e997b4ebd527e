from __future__ import annotations

import logging

import pytest

pytest.importorskip("fastapi", reason="needs the extra [server]")

from pagedkv.server.log_once import LogOnce


def record(text: str, *arguments: object, level: int = logging.WARNING) -> logging.LogRecord:
    return logging.LogRecord("x", level, "file", 1, text, arguments, None)


def test_a_line_is_shown_once_a_minute_whatever_is_filled_in() -> None:
    now_s = 0.0
    shown = LogOnce(clock=lambda: now_s).filter
    assert shown(record("from %s", "a"))
    assert not shown(record("from %s", "b"))
    assert shown(record("another"))
    now_s = 59.0
    assert not shown(record("from %s", "a"))
    now_s = 60.0
    assert shown(record("from %s", "a")) and not shown(record("from %s", "a"))


def test_different_errors_are_all_shown_and_each_once() -> None:
    shown = LogOnce(clock=lambda: 0.0).filter
    assert shown(record("a step failed: %s", "one", level=logging.ERROR))
    assert shown(record("a step failed: %s", "two", level=logging.ERROR))
    assert not shown(record("a step failed: %s", "two", level=logging.ERROR))
