"""Pages of other origins that may use the server: browsers ask it before they let them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from pagedkv.errors import InvalidInput

ANY = "*"

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:[0-9]{1,5})?")

_NEVER_SENT = re.compile(r"http:.*:80|https:.*:443")
"""Browsers leave out the port that a scheme has anyway."""


def check_origin(origin: str) -> None:
    """Raise `InvalidInput` for what no browser sends as an origin, and so would never match."""
    is_sent = _ORIGIN.fullmatch(origin) and not _NEVER_SENT.fullmatch(origin)
    if origin != ANY and not is_sent:
        raise InvalidInput(
            f"allow_origin is {origin!r}: give it as browsers send it, like https://example.org "
            "or http://localhost:3000, in small letters and without a path, or * for all"
        )


def open_to(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """`app` for pages of `origins` too; as it is, where there are none. Raises `InvalidInput`.

    Whatever it answers they may read, refusals too. What a browser asks beforehand is answered
    here, without a key: browsers show none then. There are no cookies: a key is a header that
    the page itself must know.
    """
    for origin in origins:
        check_origin(origin)
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=tuple(origins),
        allow_methods=("GET", "HEAD", "POST"),
        allow_headers=("*",),  # OpenAI's client for browsers sends a dozen of its own
        expose_headers=("X-Request-Id", "Retry-After"),
    )
