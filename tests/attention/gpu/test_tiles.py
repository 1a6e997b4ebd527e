"""Tiles fit the device that they are chosen for."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("torch", reason="needs the extra [engine]")
pytest.importorskip("triton", reason="needs triton")

from pagedkv.attention.gpu.tiles import FEWEST_ROWS, LayerKind, held_bytes, power_of_two, tiles_for
from pagedkv.errors import InvalidInput

SHARED_KIB = {"H200": 227, "A100": 163, "RTX 4090": 99, "T4": 64}


def kind(dim: int, *, is_half: bool) -> LayerKind:
    return LayerKind(8, 4, dim, dim, 0, 0, is_half)


@pytest.mark.parametrize("device", SHARED_KIB)
@pytest.mark.parametrize("is_half", [True, False])
def test_every_usual_size_of_head_has_tiles_that_fit(device: str, is_half: bool) -> None:
    shared_bytes = SHARED_KIB[device] * 1024
    for dim in (64, 80, 96, 128, 256):
        chosen = tiles_for(kind(dim, is_half=is_half), shared_bytes)
        assert chosen[0].rows == FEWEST_ROWS and chosen[-1].rows >= 32
        assert list(chosen) == sorted(chosen)
        for tile in chosen:
            assert held_bytes(tile, power_of_two(dim), is_half) <= shared_bytes


def test_what_does_not_fit_gives_way_to_smaller_tiles() -> None:
    rows = {
        kib: [tile.rows for tile in tiles_for(kind(1024, is_half=True), kib * 1024)]
        for kib in (227, 163, 99)
    }
    assert rows == {227: [16, 32], 163: [16, 32], 99: [16]}
    assert [tile.rows for tile in tiles_for(kind(1024, is_half=False), 163 * 1024)] == [16]


@pytest.mark.parametrize(
    ("is_half", "kib", "told"),
    [
        (False, 99, "1000 numbers in float32 need 130 KiB .* has 99 KiB: load the model in bf"),
        (True, 64, "1000 numbers in half precision need 98 KiB .* has 64 KiB: use another device"),
    ],
)
def test_heads_too_large_for_a_device_are_refused_in_one_line(
    is_half: bool, kib: int, told: str
) -> None:
    with pytest.raises(InvalidInput) as caught:
        tiles_for(kind(1000, is_half=is_half), kib * 1024)
    assert re.search(told, str(caught.value)) and "\n" not in str(caught.value)
