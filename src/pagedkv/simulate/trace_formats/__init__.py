"""Trace files: one small file for each format, told apart by content, and one way to read them.

`fields` is what a format says about itself, `csv_lines` and `jsonl` parse, `source` opens and
decompresses, `detection` finds the format, `reading` checks and assembles.
"""

from __future__ import annotations

from pagedkv.simulate.trace_formats.detection import FORMATS
from pagedkv.simulate.trace_formats.plain import write_trace
from pagedkv.simulate.trace_formats.reading import read_trace

__all__ = ["FORMATS", "read_trace", "write_trace"]
