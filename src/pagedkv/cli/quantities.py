"""Sizes, times and rates as people write them on a command line."""

from __future__ import annotations

import re

from pagedkv.errors import InvalidInput

_BYTES = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_SECONDS = {"": 1.0, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}

_NUMBER = re.compile(r"\s*(\d+(?:\.\d*)?(?:[eE][+-]?\d+)?)\s*([a-zA-Zµ]*)\s*")


def parse_bytes(text: str, *, option: str) -> int:
    """A size in bytes: `24GiB` is 24 * 2**30, `24GB` is 24 * 10**9, a bare number is bytes.

    Raises `InvalidInput`, naming `option`.

    >>> parse_bytes("24GiB", option="--memory")
    25769803776
    """
    return int(_parse(text, _BYTES, option=option, example="24GiB"))


def parse_seconds(text: str, *, option: str) -> float:
    """A time in seconds: `20ms`, `1.5s`, `10min`, `1h`, a bare number is seconds.

    Raises `InvalidInput`, naming `option`.

    >>> parse_seconds("1h", option="--duration")
    3600.0
    """
    return _parse(text, _SECONDS, option=option, example="20ms")


def _parse(
    text: str, units: dict[str, int] | dict[str, float], *, option: str, example: str
) -> float:
    match = _NUMBER.fullmatch(text)
    if match is None:
        raise InvalidInput(f"{option}: {text!r} is no number with a unit: write it like {example}")
    number, unit = match.groups()
    if unit.lower() not in units:
        known = ", ".join(name for name in units if name and name != "b")
        raise InvalidInput(f"{option}: {text!r} has an unknown unit {unit!r}: use one of {known}")
    value = float(number) * units[unit.lower()]
    if value <= 0:
        raise InvalidInput(f"{option}: {text!r} is not above 0")
    return value
