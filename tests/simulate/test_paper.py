"""The PagedAttention paper's setting, and its figures beside ours."""

from __future__ import annotations

import pytest

from pagedkv.simulate import paper
from pagedkv.simulate.model_geometry import model_geometry
from pagedkv.simulate.results import count_within_bar
from pagedkv.simulate.simulator import SCHEMES, SimulationConfig
from pagedkv.simulate.trace import Trace
from pagedkv.simulate.workloads import make_workload

BYTES_PER_TOKEN = 819_200
MAX, POW2, ORACLE, VLLM = "Orca (Max)", "Orca (Pow2)", "Orca (Oracle)", "vLLM"

# What the paper published, written down once more and apart from the code.
FIGURE_2 = {
    MAX: [20.4, 13.3, 57.3, 8.9],
    POW2: [26.8, 17.9, 13.6, 41.6],
    ORACLE: [38.2, 25.2, 0.0, 36.6],
    VLLM: [96.3],
}
FIGURE_13 = {MAX: [7.00, 7.00], POW2: [9.81, 43.24], ORACLE: [13.62, 72.75], VLLM: [30.42, 132.44]}
FIGURE_15 = {VLLM: [6.09, 8.53, 9.79]}


@pytest.fixture(scope="module")
def setting() -> SimulationConfig:
    return paper.setting(bytes_per_token=BYTES_PER_TOKEN)


def test_the_setting_is_the_papers(setting: SimulationConfig) -> None:
    geometry = model_geometry(paper.MODEL, kv_dtype=paper.KV_DTYPE)
    assert geometry.kv_bytes_per_token == BYTES_PER_TOKEN
    assert setting.num_slots == 15_728
    assert setting.block_size == 16
    assert setting.placement == "buddy"
    assert setting.max_model_len == 2048
    assert setting.horizon_s == 3600
    assert not setting.prefix_caching


def test_the_fitted_step_time_is_littles_law_on_two_means_of_figure_13(
    setting: SimulationConfig,
) -> None:
    # A request generates o tokens, one a step; at rate r, a mean of b run: b = r * o * step.
    for rate_per_s, output_tokens, batch in ((2.0, 337.99, 30.42), (30.0, 58.45, 132.44)):
        step_s = setting.step_time.base_s + setting.step_time.sequence_s * batch
        assert rate_per_s * output_tokens * step_s == pytest.approx(batch, rel=0.02)


@pytest.mark.heavy
def test_every_figure_is_within_its_bar(setting: SimulationConfig) -> None:
    seen: list[tuple[str, float]] = []
    comparison = paper.compare(
        setting, seed=0, progress=lambda what, done: seen.append((what, done))
    )
    for figure in comparison.figures:
        assert figure.within_bar, figure

    for name, published, bar in (
        ("figure 2", FIGURE_2, (8, "points")),
        ("figure 13", FIGURE_13, (25, "percent")),
        ("figure 15", FIGURE_15, (4, "points")),
    ):
        for system, values in published.items():
            rows = [f for f in comparison.figures if (f.figure, f.system) == (name, system)]
            assert [row.paper for row in rows] == values
            if (name, system) == ("figure 2", VLLM):
                bar = (96, "at least")
            assert {(row.bar, row.bar_kind) for row in rows} == {bar}
    assert len(comparison.figures) == 13 + 8 + 3
    fitted = [(f.figure, f.system, f.paper) for f in comparison.figures if f.is_fitted]
    assert fitted == [("figure 13", VLLM, 30.42), ("figure 13", VLLM, 132.44)]
    assert count_within_bar(comparison.figures) == (
        "22 of 22 figures within the bar, and 2 fitted ones."
    )

    # Of each contiguous system the four kinds are the whole memory.
    for system in (MAX, POW2, ORACLE):
        shares = [
            f.ours for f in comparison.figures if (f.figure, f.system) == ("figure 2", system)
        ]
        assert sum(shares) == pytest.approx(100, abs=1e-6)

    # The schemes shown in full are those of the ShareGPT hour.
    assert tuple(scheme.scheme for scheme in comparison.schemes) == SCHEMES
    means = [
        f.ours for f in comparison.figures if f.figure == "figure 13" and "ShareGPT" in f.quantity
    ]
    assert sorted(means) == sorted(scheme.running_mean for scheme in comparison.schemes)
    assert len(comparison.sharegpt) == pytest.approx(7200, rel=0.05)
    assert all(scheme.duration_s == pytest.approx(3600, rel=0.01) for scheme in comparison.schemes)

    # Progress says what runs, and never runs beyond its end.
    assert {"ShareGPT, paged", "Alpaca, reserve-max", "6 samples, paged"} <= {w for w, _ in seen}
    assert all(0 <= done <= 1.001 for _, done in seen)


def test_each_workload_comes_at_its_rate_whatever_the_samples(
    setting: SimulationConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = []

    def note(name: str, **arguments: float) -> Trace:
        drawn.append((name, arguments["rate_per_s"], arguments["duration_s"]))
        return make_workload(name, num_requests=2)

    monkeypatch.setattr(paper, "make_workload", note)
    paper.compare(setting, seed=0)
    assert drawn == [
        ("sharegpt", 2.0, 3600),
        ("alpaca", 30.0, 3600),
        ("sharegpt", 3.0, 3600),
        ("alpaca", 15.0, 600),
        ("alpaca", 7.5, 600),
        ("alpaca", 5.0, 600),
    ]


def test_the_same_seed_gives_the_same_figures(
    setting: SimulationConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paper, "HOUR_S", 30.0)
    short = paper.setting(bytes_per_token=BYTES_PER_TOKEN)
    first, again, other = (paper.compare(short, seed=seed).figures for seed in (3, 3, 4))
    assert first == again
    assert first != other
