"""A scheme's result against the replay in plain Python."""

from __future__ import annotations

import numpy as np
import pytest

from models.made_trace import Request
from models.replay_model import Replay
from pagedkv.simulate.results import KINDS, Percentiles, SchemeResult


def check_beside(result: SchemeResult, slow: Replay, of: dict[int, Request]) -> None:
    """`of`: sequence -> its request, for all that are not refused."""
    assert result.num_steps == slow.num_steps
    assert result.finished == len(slow.finish_s)
    assert result.began == len(slow.first_token_s)
    assert result.preemptions == slow.preemptions
    assert result.duration_s == pytest.approx(slow.now_s)
    assert [result.share[kind] for kind in KINDS] == pytest.approx(slow.share(), abs=1e-9)
    assert result.running_mean == pytest.approx(slow.running_mean())
    assert result.running_peak == max(p.running for p in slow.periods)
    assert result.requests_per_s == pytest.approx(len(slow.finish_s) / slow.now_s)
    assert result.output_tokens_per_s == pytest.approx(slow.output_tokens / slow.now_s)
    ttft_s = [at - of[s][0] for s, at in slow.first_token_s.items()]
    _check_percentiles(result.ttft_s, ttft_s)
    tpot_s = [
        (at - slow.first_token_s[s]) / (of[s][2] - 1)
        for s, at in slow.finish_s.items()
        if of[s][2] > 1
    ]
    _check_percentiles(result.tpot_s, tpot_s)
    line = result.timeline
    assert line.share.sum(axis=1) == pytest.approx(1.0)
    seconds = line.end_s - line.start_s
    assert seconds.sum() == pytest.approx(slow.now_s)
    for seen, wanted in ((line.running, "running"), (line.waiting, "waiting")):
        whole = sum((p.stop_s - p.start_s) * getattr(p, wanted) for p in slow.periods)
        assert (seen * seconds).sum() == pytest.approx(whole)


def _check_percentiles(seen: Percentiles, values: list[float]) -> None:
    if not values:
        assert np.isnan([seen.p50, seen.p90, seen.p99]).all()
        return
    assert [seen.p50, seen.p90, seen.p99] == pytest.approx(
        [float(np.percentile(values, p)) for p in (50, 90, 99)]
    )
