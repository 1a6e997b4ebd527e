"""`--what-if NAME=VALUE,VALUE`: the settings to vary, and what a choice of them makes of the rest.

Every combination is a choice. Whatever is varied, the memory stays as large as it was unless
num-blocks says otherwise: half the block size is twice the blocks, and `2x` is twice the memory.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from pagedkv.cli.simulate_request import MOST, Given
from pagedkv.errors import InvalidInput

MOST_CHOICES = 1_000

_COUNTS = {
    "num-blocks": "num_blocks",
    "block-size": "block_size",
    "max-num-seqs": "max_num_seqs",
    "max-num-batched-tokens": "max_num_batched_tokens",
}
_SWITCHES = {"prefix-caching": "prefix_caching", "chunked-prefill": "chunked_prefill"}
_ON_OR_OFF = {"on": True, "off": False}
LOAD = "load"
WATERMARK = "watermark"
NAMES = (*_COUNTS, *_SWITCHES, WATERMARK, LOAD)
"""What can be varied: options of the command, and how many times as fast requests come."""

_FACTOR = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)x")
_MOST_DIGITS = 20
"""Of a number in a value; Python itself refuses to read one of thousands."""

_LEAST_FACTOR, _MOST_FACTOR = Fraction(1, 1_000_000), Fraction(1_000_000)
"""Beyond these, seconds added up as floats lose what a step takes."""


@dataclass(frozen=True)
class Variation:
    """One setting and its values, as they were written."""

    name: str
    values: tuple[str, ...]


@dataclass(frozen=True)
class Choice:
    """One value for each variation, and the command line that comes of them."""

    values: tuple[str, ...]
    given: Given
    num_blocks: int
    load: float


def parse_variations(texts: Sequence[str]) -> tuple[Variation, ...]:
    """What each `--what-if` says.

    Raises `InvalidInput`, one line, for anything that is not NAME=VALUE,VALUE with a name of
    `NAMES`, each once.
    """
    variations: list[Variation] = []
    for text in texts:
        name, equals, listed = text.partition("=")
        name = name.strip().lower().replace("_", "-")
        values = tuple(value.strip() for value in listed.split(","))
        if not equals or not all(values):
            raise InvalidInput(
                f"--what-if {text!r}: give NAME=VALUE,VALUE, such as num-blocks=0.5x,1x,2x"
            )
        if name not in NAMES:
            raise InvalidInput(
                f"--what-if {text!r}: {name!r} cannot be varied: use one of {', '.join(NAMES)}"
            )
        if any(name == other.name for other in variations):
            raise InvalidInput(f"--what-if {name} is given twice: list its values in one")
        if len(set(values)) < len(values):
            raise InvalidInput(f"--what-if {text!r}: a value is listed twice: leave one out")
        variations.append(Variation(name, values))
    count = math.prod(len(variation.values) for variation in variations)
    if count > MOST_CHOICES:
        raise InvalidInput(
            f"--what-if asks for {count:,} combinations: give at most {MOST_CHOICES:,}"
        )
    return tuple(variations)


def choices(variations: Sequence[Variation], given: Given, num_blocks: int) -> Iterator[Choice]:
    """Every combination of the values; `given` has `num_blocks` blocks before any of them.

    Raises `InvalidInput` for a value that its setting cannot have.
    """
    names = [variation.name for variation in variations]
    for values in itertools.product(*(variation.values for variation in variations)):
        yield _choice(dict(zip(names, values)), given, num_blocks)


def base_values(variations: Sequence[Variation], given: Given, num_blocks: int) -> tuple[str, ...]:
    """The value that each varied setting has where nothing is varied."""
    values = []
    for variation in variations:
        if variation.name == LOAD:
            values.append("1x")
        elif variation.name == WATERMARK:
            values.append(str(given.watermark))
        elif variation.name in _SWITCHES:
            is_on = getattr(given, _SWITCHES[variation.name])
            values.append("on" if is_on else "off")
        elif variation.name == "num-blocks":
            values.append(str(num_blocks))
        else:
            values.append(str(getattr(given, _COUNTS[variation.name])))
    return tuple(values)


def _choice(written: dict[str, str], given: Given, num_blocks: int) -> Choice:
    slots = num_blocks * given.block_size
    changes: dict[str, int | float | bool] = {}
    for name, value in written.items():
        if name in _SWITCHES:
            changes[_SWITCHES[name]] = _switch(name, value)
        elif name == WATERMARK:
            changes[WATERMARK] = _number(name, value)
        elif name not in ("num-blocks", LOAD):
            changes[_COUNTS[name]] = _count(name, value, getattr(given, _COUNTS[name]))
    block_size = int(changes.get("block_size") or given.block_size)
    blocks = written.get("num-blocks", "1x")
    if _FACTOR.fullmatch(blocks):
        num_blocks = int(slots * _factor("num-blocks", blocks)) // block_size
        if num_blocks < 1:
            raise InvalidInput(
                f"--what-if num-blocks={blocks}: {slots:,} slots have no room for a block of "
                f"{block_size} tokens"
            )
        if num_blocks > MOST:
            raise InvalidInput(
                f"--what-if num-blocks={blocks}: that is {num_blocks:,} blocks of {block_size} "
                f"tokens, and {MOST:,} is the most"
            )
    else:
        num_blocks = _count("num-blocks", blocks, num_blocks)
    load = float(_factor(LOAD, written[LOAD])) if LOAD in written else 1.0
    return Choice(tuple(written.values()), replace(given, **changes), num_blocks, load)  # type: ignore[arg-type]


def _count(name: str, value: str, base: int) -> int:
    if _FACTOR.fullmatch(value):
        count = int(base * _factor(name, value))
    elif value.isdecimal() and len(value) <= _MOST_DIGITS:
        count = int(value)
    else:
        raise InvalidInput(
            f"--what-if {name}: {value!r} is no count: give a number such as 64, or a factor "
            "such as 0.5x"
        )
    if not 1 <= count <= MOST:
        bound = "at least 1" if count < 1 else f"at most {MOST:,}"
        raise InvalidInput(f"--what-if {name}={value}: that is {count:,}: give {bound}")
    return count


def _factor(name: str, value: str) -> Fraction:
    """The factor, exactly: 0.29x of 100 is 29, and less as floats."""
    match = _FACTOR.fullmatch(value)
    if match is None or len(match[1]) > _MOST_DIGITS:
        raise InvalidInput(f"--what-if {name}: {value!r} is no factor: give one such as 2x")
    factor = Fraction(match[1])
    if not _LEAST_FACTOR <= factor <= _MOST_FACTOR:
        raise InvalidInput(
            f"--what-if {name}={value}: give a factor from {float(_LEAST_FACTOR):f}x to "
            f"{int(_MOST_FACTOR)}x"
        )
    return factor


def _switch(name: str, value: str) -> bool:
    if value not in _ON_OR_OFF:
        raise InvalidInput(f"--what-if {name}: {value!r} is neither on nor off")
    return _ON_OR_OFF[value]


def _number(name: str, value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise InvalidInput(f"--what-if {name}: {value!r} is no number") from None
