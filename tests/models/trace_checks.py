"""What every `Trace` that a reader returns must be, checked one request at a time."""

from __future__ import annotations

import math

from pagedkv.simulate.trace import Trace


def check_trace(trace: Trace) -> None:
    n = len(trace)
    assert n >= 1
    assert len(trace.prompt_tokens) == len(trace.output_tokens) == len(trace.session) == n
    assert len(trace.prefix_offsets) == n + 1 and trace.prefix_offsets[0] == 0
    assert trace.prefix_offsets[-1] == len(trace.prefix_ids)
    assert trace.arrival_s[0] == 0
    seen = -1
    for i in range(n):
        assert math.isfinite(trace.arrival_s[i])
        assert i == 0 or trace.arrival_s[i] >= trace.arrival_s[i - 1]
        assert trace.prompt_tokens[i] >= 1 and trace.output_tokens[i] >= 1
        assert trace.session[i] >= -1
        ids = trace.prefix_ids[trace.prefix_offsets[i] : trace.prefix_offsets[i + 1]]
        covered = trace.prompt_tokens[i] + trace.output_tokens[i] * trace.covers_output
        assert len(ids) == (math.ceil(covered / trace.granularity) if trace.granularity else 0)
        for one in ids.tolist():
            assert 0 <= one <= seen + 1
            seen = max(seen, one)
    for column in ("prompt_tokens", "output_tokens", "session", "prefix_ids", "prefix_offsets"):
        assert getattr(trace, column).dtype == "int64"
    assert trace.arrival_s.dtype == "float64"
    assert all("\n" not in remark for remark in trace.remarks)
