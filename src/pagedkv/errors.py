"""Every error that pagedkv raises on purpose.

::

    PagedKVError
    ├── Refused            the request is well formed, but cannot be served now
    │   └── OutOfBlocks    more blocks needed than are available
    ├── InvalidInput       what was given is wrong (also a ValueError)
    │   ├── UnknownSequence    no such sequence in this manager
    │   ├── TraceError         a trace file that cannot be read
    │   └── NeverFits          larger than the whole memory
    └── BrokenLaw          an invariant of the memory does not hold: a bug in pagedkv

The message of a `Refused` or an `InvalidInput` is one line that a user can act on.
"""

from __future__ import annotations


class PagedKVError(Exception):
    """Base of all errors of pagedkv."""


class Refused(PagedKVError):
    """The request is well formed, but cannot be served now; nothing was changed."""


class OutOfBlocks(Refused):
    """More physical blocks are needed than are available; nothing was changed."""

    def __init__(self, *, needed: int, available: int) -> None:
        super().__init__(f"{needed} blocks needed, {available} available")
        self.needed = needed
        self.available = available


class InvalidInput(PagedKVError, ValueError):
    """What was given is wrong: the message names what, where and what to do."""


class UnknownSequence(InvalidInput):
    """The sequence was never added, or was freed before."""

    def __init__(self, sequence: int) -> None:
        super().__init__(f"unknown sequence {sequence}: it was never added or is already freed")
        self.sequence = sequence


class TraceError(InvalidInput):
    """A trace that cannot be read, with the file and, where known, line and field."""

    def __init__(
        self, problem: str, *, file: str, line: int | None = None, field: str | None = None
    ) -> None:
        place = file
        if line is not None:
            place += f", line {line}"
        if field is not None:
            place += f", field {field!r}"
        super().__init__(f"{place}: {problem}")
        self.problem = problem
        self.file = file
        self.line = line
        self.field = field


class NeverFits(InvalidInput):
    """A request, or a sequence, that is larger than the whole memory: waiting does not help.

    `request` or `sequence` names it where it has a name; nothing was changed.
    """

    def __init__(
        self, *, needed: int, capacity: int, request: str | None = None, sequence: int | None = None
    ) -> None:
        who = "the sequence" if sequence is None else f"sequence {sequence}"
        if request is not None:
            who = f"request {request}"
        super().__init__(f"{who} needs {needed} blocks, the whole memory has {capacity}")
        self.request = request
        self.sequence = sequence
        self.needed = needed
        self.capacity = capacity


class BrokenLaw(PagedKVError):
    """One or more laws of the memory do not hold; `laws` lists every one by its number."""

    def __init__(self, laws: list[str]) -> None:
        super().__init__("; ".join(laws))
        self.laws = laws
