"""Lines of progress in a recording: how far requests had come that were under way.

A request is one whole line for each of its answers once it has ended (`recorded`). Before that a
line of progress names it: `{"step": 120, "s": 8.3, "under_way": [...]}` was written before step
120, and each entry is an answer that had grown since the line of progress before. The first entry
of an answer has all its fields, later ones their number of tokens and the keys from the last
whole piece on. `"under_way": []` with nobody left says that the run had come to rest. Some tell of
the steps since the line of progress before, too (`measured`).

`WholeLines` makes whole lines of all that: those of requests that ended, and of requests
that had not when the recording did, as if they had been cancelled then.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

from pagedkv.errors import TraceError
from pagedkv.simulate.trace_formats.fields import MAX_TOKENS
from pagedkv.simulate.trace_formats.measured import StepLists

Line: TypeAlias = tuple[int, dict[str, Any]]
"""A line's number, 1-based, and the object on it."""

_FIELD = "under_way"


def is_progress(found: Container[str]) -> bool:
    """Whether an object, or the names of its fields, are a line of progress."""
    return _FIELD in found


@dataclass(frozen=True)
class CutOff:
    """Where a recording ends before its run did."""

    step: int | None
    """The step before which its last progress was written; None where there is none."""
    s: float = 0.0
    """When that was, in seconds since the engine began."""
    num_under_way: int = 0
    """Requests that had not ended."""
    num_left_out: int = 0
    """Lines behind, of requests that ended later, which are left out."""

    @property
    def remark(self) -> str:
        """What there is to say about it, one line."""
        if self.step is None:
            return (
                "the run was cut off before its first progress; requests that had not ended are "
                "missing"
            )
        text = (
            f"the run was cut off: its last progress is of step {self.step}, {self.s:.1f} s after "
            "it began"
        )
        if self.num_under_way:
            those = _counted(self.num_under_way, "request was", "requests were")
            text += f", when {those} under way, told as far as they had come"
        if self.num_left_out:
            those = _counted(self.num_left_out, "answer that ended", "answers that ended")
            text += f"; {those} in the second after that left out, to go by steps"
        return f"{text}; {_LATER}"


_LATER = "requests that came later and had not ended are missing"


def _counted(number: int, one: str, several: str) -> str:
    return f"{number} {one if number == 1 else several}"


class WholeLines:
    """The lines of a recording without those of progress.

    `cut_off` and `steps` are known after the last one.

    `by_step` gives what was so at the last progress: who ended later goes on there, and who came
    later is missing, since then all steps before it can be repeated as they were.
    """

    def __init__(self, lines: Iterable[Line], file: str, *, by_step: bool) -> None:
        self._lines = lines
        self._file = file
        self._by_step = by_step
        self._under_way: dict[int, dict[int, Line]] = {}  # by request and sample
        self._settings: Any = None
        self.cut_off: CutOff | None = None
        self.steps = StepLists(file)

    def __iter__(self) -> Iterator[Line]:
        """The lines. Raises TraceError, line and field, for progress that cannot be."""
        since: list[Line] = []  # lines since the last progress
        last: Line | None = None
        for number, found in self._lines:
            if not is_progress(found):
                since.append((number, found))
                continue
            yield from self._settled(since)
            since.clear()
            self._note(number, found)
            last = number, found
        if last is None:
            # A run that is whole ends with a line that says so, if it is one that tells times.
            if any("first_token_s" in found for _, found in since):
                self.cut_off = CutOff(None)
            yield from self._settled(since)
            return
        left_out = len(since) if self._by_step else 0
        if not left_out:
            yield from self._settled(since)
        number, found = last
        if self._under_way or since:  # a run that is whole ends with one that nobody is left in
            step, seconds = found.get("step"), found.get("s")
            if type(step) is not int or not 0 <= step <= MAX_TOKENS:
                problem = "is not the number of a step"
                raise TraceError(problem, file=self._file, line=number, field="step")
            if type(seconds) is not float and type(seconds) is not int:
                problem = "is not a number of seconds"
                raise TraceError(problem, file=self._file, line=number, field="s")
            self.cut_off = CutOff(step, float(seconds), len(self._under_way), left_out)
            for samples in self._under_way.values():
                for place, line in samples.values():
                    if not line.pop("ended", False):
                        line["cancelled_step"] = step
                    yield place, self._first(line)

    def _settled(self, lines: list[Line]) -> Iterator[Line]:
        """Lines of requests that ended."""
        for number, found in lines:
            request = found.get("request")
            if type(request) is int:
                self._under_way.pop(request, None)
            yield number, self._first(found)

    def _first(self, line: dict[str, Any]) -> dict[str, Any]:
        """The first line that is left gets the settings that a line of progress had."""
        if self._settings is not None:
            line = {**line, "engine": self._settings}
            self._settings = None
        return line

    def _note(self, number: int, progress: dict[str, Any]) -> None:
        def wrong(problem: str) -> TraceError:
            return TraceError(problem, file=self._file, line=number, field=_FIELD)

        self._settings = progress.get("engine", self._settings)
        self.steps.add(progress, number)
        entries = progress[_FIELD]
        if not isinstance(entries, list):
            raise wrong("is not a list of answers")
        granularity = progress.get("prefix_granularity")
        for entry in entries:
            if not isinstance(entry, dict):
                raise wrong("is not a list of answers")
            request, sample = entry.get("request"), entry.get("sample")
            if type(request) is not int or type(sample) is not int:
                raise wrong("has an answer without the numbers of its request and sample")
            told = self._under_way.setdefault(request, {})
            if sample not in told:
                told[sample] = (
                    number,
                    {
                        **entry,
                        "prefix_granularity": granularity,
                        "covers_output": True,
                    },
                )
                continue
            before = told[sample][1]
            ids, more = before.get("prefix_ids"), entry.get("prefix_ids")
            prompt, said = before.get("prompt_tokens"), before.get("output_tokens")
            if type(prompt) is not int or type(said) is not int or type(granularity) is not int:
                raise wrong(f"has no numbers of tokens of request {request}")
            if not isinstance(ids, list) or not isinstance(more, list) or granularity < 1:
                raise wrong(f"has no list of ids of request {request}")
            ids[(prompt + said) // granularity :] = more
            told[sample] = number, {**before, **entry, "prefix_ids": ids}
