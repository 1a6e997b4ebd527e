"""The sentences that tell a result, in the terminal and in the report."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from models.sample_results import nan_result, sample_result
from pagedkv.simulate.headline import (
    curve_rows,
    headlines,
    hit_rate_at,
    memory_size,
    paged_and_rival,
    show_bytes,
    show_seconds,
    simulated_blocks,
)
from pagedkv.simulate.results import HitRateCurve

RESULT = sample_result(num_requests=60)
CURVE = HitRateCurve(
    block_size=16,
    accesses=10,
    distinct=4,
    blocks=np.array([2, 5, 9], dtype=np.int64),
    hit_rate=np.array([0.1, 0.3, 0.4]),
    ceiling=0.4,
    smallest={0.5: 5, 1.0: 9},
)


def _with_running(scheme_means: dict[str, float]):
    return replace(
        RESULT,
        schemes=tuple(
            replace(s, running_mean=scheme_means.get(s.scheme, 1.0)) for s in RESULT.schemes
        ),
    )


def test_the_first_sentence_gives_both_numbers_and_their_ratio() -> None:
    result = _with_running({"paged": 30.42, "reserve-max": 7.0})
    paged, *others = result.schemes
    for no_hits in (None, 0.0):
        without = replace(result, schemes=(replace(paged, hit_rate_first=no_hits), *others))
        assert headlines(without)[0] == (
            "Paged memory holds 30.4 requests at once where reserve-max holds 7.0 (4.3 times as "
            "many)."
        )
        assert "has no prefix cache" not in " ".join(headlines(without))


def test_what_the_prefix_cache_has_done_is_not_credited_to_paging_alone() -> None:
    result = _with_running({"paged": 30.42, "reserve-max": 7.0})
    first, _, third, _, last = headlines(result)
    assert first == (
        "Paged memory and its prefix cache together hold 30.4 requests at once where reserve-max "
        "holds 7.0 (4.3 times as many)."
    )
    assert last == "--no-prefix-caching shows what paging alone does."
    assert third.endswith(" under reserve-max, which has no prefix cache.")


def test_a_run_in_which_memory_was_never_short_is_told_as_that() -> None:
    result = _with_running({"paged": 3.02, "reserve-max": 3.0})
    assert headlines(result)[0].startswith("At this load memory is not the limit")
    assert "--no-prefix-caching" not in " ".join(headlines(result))


def test_a_run_of_one_scheme_is_told_without_a_rival() -> None:
    for name in ("paged", "reserve-pow2"):
        alone = sample_result(schemes=(name,), num_requests=20)
        (sentence,) = headlines(alone)
        assert sentence.startswith(f"{name} holds ")


def test_the_rival_is_reserve_max_wherever_it_stands() -> None:
    result = replace(RESULT, schemes=RESULT.schemes[::-1])
    paged, rival = paged_and_rival(result)
    assert paged is not None and paged.scheme == "paged"
    assert rival is not None and rival.scheme == "reserve-max"


def test_no_sentence_is_made_of_numbers_that_were_not_observed() -> None:
    text = " ".join(headlines(nan_result()))
    assert "nan" not in text
    assert "first token" not in text


def test_who_never_saw_a_first_token_is_not_told_as_having_seen_one() -> None:
    paged, rival, *rest = RESULT.schemes
    cut = replace(RESULT, schemes=(paged, replace(rival, began=17), *rest))
    (sentence,) = (s for s in headlines(cut) if "first token" in s)
    assert sentence.startswith("Half of the requests that saw a first token saw it within ")
    assert "(60 requests), against " in sentence and sentence.endswith(
        " under reserve-max (17), which has no prefix cache."
    )


def test_the_hit_rate_between_two_points_is_that_of_the_lower_one() -> None:
    at = [hit_rate_at(CURVE, n) for n in (0, 1, 2, 4, 5, 8, 9, 10**9)]
    assert at == [0.0, 0.0, 0.1, 0.1, 0.3, 0.3, 0.4, 0.4]


def test_the_simulated_memory_is_counted_in_blocks_of_the_curve() -> None:
    result = replace(RESULT, num_blocks=320, block_size=16)
    assert simulated_blocks(replace(CURVE, block_size=512), result) == 10


def test_sizes_worth_naming_are_in_order_with_this_memory_among_them() -> None:
    result = replace(RESULT, num_blocks=7, block_size=16)
    assert curve_rows(CURVE, result) == [
        ("50 % of the ceiling", 5, False),
        ("the memory simulated here", 7, True),
        ("100 % of the ceiling", 9, False),
    ]


def test_bytes_are_named_only_where_the_size_of_a_token_is_known() -> None:
    assert memory_size(replace(RESULT, num_blocks=1024, bytes_per_token=2**17)) == (
        "1,024 blocks of 16 tokens (2.00 GiB)"
    )
    assert memory_size(replace(RESULT, num_blocks=1024, bytes_per_token=None)) == (
        "1,024 blocks of 16 tokens"
    )


def test_sizes_and_times_have_the_unit_that_reads_best() -> None:
    assert [show_bytes(n) for n in (5, 2**10, 3 * 2**29, 2**41)] == [
        "5 B",
        "1.00 KiB",
        "1.50 GiB",
        "2.00 TiB",
    ]
    assert [show_seconds(t) for t in (0.5, 1.0, 179.0, 180.0, 7200.0)] == [
        "500 ms",
        "1.00 s",
        "179 s",
        "3.00 min",
        "2.00 h",
    ]
