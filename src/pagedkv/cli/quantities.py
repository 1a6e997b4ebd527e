"""Sizes, times and rates as people write them on a command line."""

from __future__ import annotations

import math
import re

from pagedkv.errors import InvalidInput

_BYTES = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
_SECONDS = {"": 1.0, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}

_NUMBER = re.compile(r"\s*(\d+(?:\.\d*)?(?:[eE][+-]?\d+)?)\s*([a-zA-Zµ]*)\s*")


def parse_bytes(text: str, *, option: str) -> int:
    """A size in bytes: `24GiB` is 24 * 2**30, `24GB` is 24 * 10**9, a bare number is bytes.

    Raises `InvalidInput`, naming `option`.

    >>> parse_bytes("24GiB", option="--memory")
    25769803776
    """
    value = int(_parse(text, _BYTES, option=option, example="24GiB"))
    if value < 1:
        raise InvalidInput(f"{option}: {text!r} is less than a byte")
    return value


def is_bare(text: str) -> bool:
    """Whether a size or a time is a number without a unit, which may have been forgotten.

    >>> is_bare("24"), is_bare("24B")
    (True, False)
    """
    match = _NUMBER.fullmatch(text)
    return match is not None and not match[2]


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
    # An "M" alone is a million to some and 2**20 to others, an "m" a minute or a metre: neither
    # is taken. Case says nothing.
    factors = {name.lower(): factor for name, factor in units.items()}
    if unit.lower() not in factors:
        known = ", ".join(name for name in units if name)
        raise InvalidInput(f"{option}: {text!r} has an unknown unit {unit!r}: use one of {known}")
    value = float(number) * factors[unit.lower()]
    if value <= 0:
        raise InvalidInput(f"{option}: {text!r} is not above 0")
    if not math.isfinite(value):
        raise InvalidInput(f"{option}: {text!r} is too large")
    return value
