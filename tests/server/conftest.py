"""What all tests of the server begin with."""

from __future__ import annotations

import logging

import pytest

from pagedkv.server.log_once import LogOnce


@pytest.fixture(autouse=True)
def nothing_logged_yet() -> None:
    """Loggers are the process's: what another test had them say a minute ago they would not say
    again."""
    for name in ("pagedkv.server", "uvicorn.error"):
        for found in logging.getLogger(name).filters:
            if isinstance(found, LogOnce):
                found.forget()
