"""The walkthrough's story holds whatever its numbers are: its laws, not its wording."""

from __future__ import annotations

import pytest

from pagedkv.cli import story
from pagedkv.cli.story import Scene, tell


@pytest.fixture(scope="module")
def scenes() -> dict[str, Scene]:
    return {scene.title: scene for scene in tell()}


@pytest.fixture(scope="module")
def four(scenes: dict[str, Scene]) -> Scene:
    return scenes["A, B, C and D arrive"]


@pytest.fixture(scope="module")
def two(scenes: dict[str, Scene]) -> Scene:
    return scenes["A and C leave"]


@pytest.fixture(scope="module")
def five(scenes: dict[str, Scene]) -> Scene:
    return scenes["E arrives"]


def test_e_gets_exactly_the_blocks_that_a_and_c_left(four: Scene, five: Scene) -> None:
    left = {*four.paged.tables["A"], *four.paged.tables["C"]}
    assert set(five.paged.tables["E"]) == left


def test_the_block_table_of_e_is_the_worked_example(five: Scene) -> None:
    assert five.paged.tables["E"] == (7, 2, 15)


def test_e_needs_more_than_any_hole_offers_even_in_whole_blocks(two: Scene, five: Scene) -> None:
    free = set(two.paged.free)
    needed = len(five.paged.tables["E"])
    runs = [range(block, block + needed) for block in range(story.NUM_BLOCKS - needed + 1)]
    assert len(free) >= needed
    assert not any(free.issuperset(run) for run in runs)


def test_contiguous_memory_refuses_e_though_enough_is_free(two: Scene, five: Scene) -> None:
    assert five.contiguous is not None
    assert two.contiguous is not None
    assert five.contiguous.refused == "E"
    assert sum(five.contiguous.holes) >= story.LENGTHS["E"] > max(five.contiguous.holes)
    assert five.contiguous.regions == two.contiguous.regions


def test_both_memories_hold_the_same_sequences_until_e_comes(four: Scene, two: Scene) -> None:
    for scene in (four, two):
        assert scene.contiguous is not None
        placed = {r.name: r.num_slots for r in scene.contiguous.regions if r.name}
        assert placed == {name: story.LENGTHS[name] for name in scene.paged.tables}
        for name, num_tokens in placed.items():
            blocks = [scene.paged.blocks[block] for block in scene.paged.tables[name]]
            assert sum(block.num_tokens for block in blocks) == num_tokens


def test_regions_and_holes_together_are_the_whole_memory(scenes: dict[str, Scene]) -> None:
    for scene in scenes.values():
        if scene.contiguous is not None:
            regions = scene.contiguous.regions
            assert [0, *(r.stop for r in regions)] == [
                *(r.start for r in regions),
                story.NUM_BLOCKS * story.BLOCK_SIZE,
            ]


def test_blocks_are_used_by_those_whose_tables_name_them(scenes: dict[str, Scene]) -> None:
    for scene in scenes.values():
        for number, block in enumerate(scene.paged.blocks):
            users = [name for name, table in scene.paged.tables.items() if number in table]
            assert list(block.users) == users
            assert (block.num_tokens > 0) == (bool(users) or block.cached)


def test_the_translation_is_the_one_of_the_documentation(scenes: dict[str, Scene]) -> None:
    translation = scenes["Where is token 20 of E?"].translation
    assert translation is not None
    assert translation.table == scenes["E arrives"].paged.tables["E"]
    assert translation.address == (1, 2, 4, 36)
    assert translation.block_size == 16


def test_e_grows_by_one_block_and_its_last_one_holds_one_token(scenes: dict[str, Scene]) -> None:
    before = scenes["E arrives"].paged.tables["E"]
    grown = scenes["E writes on, token by token"].paged
    assert grown.tables["E"][:-1] == before
    assert grown.blocks[grown.tables["E"][-1]].num_tokens == 1
    assert all(grown.blocks[block].num_tokens == story.BLOCK_SIZE for block in before)


def test_a_fork_shares_all_blocks_but_the_copied_one(scenes: dict[str, Scene]) -> None:
    forked = scenes["B leaves, E forks, F writes"]
    parent, child = forked.paged.tables["E"], forked.paged.tables["F"]
    assert parent[:-1] == child[:-1]
    assert parent[-1] != child[-1]
    assert all(forked.paged.blocks[block].users == ("E", "F") for block in parent[:-1])
    assert forked.paged.blocks[child[-1]].users == ("F",)
    assert f"Block {parent[-1]} is E's too" in forked.told
    assert f"copy of it, block {child[-1]}" in forked.told
    assert f"slot {child[-1] * story.BLOCK_SIZE + 1}" in forked.told


def test_g_finds_the_full_blocks_that_it_has_in_common_with_e(scenes: dict[str, Scene]) -> None:
    found = scenes["E and F leave, G begins as E did"].paged
    e = scenes["E arrives"].paged.tables["E"]
    num_hits = story.COMMON_TOKENS // story.BLOCK_SIZE
    assert found.tables["G"][:num_hits] == e[:num_hits]
    assert [number for number, block in enumerate(found.blocks) if block.cached] == [e[2]]


def test_every_scene_is_told_by_the_memory_it_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """With nothing there before, other blocks are handed out, and the story tells those."""
    monkeypatch.setattr(story, "EARLIER_LEAVE", "uvwxy")
    scenes = {scene.title: scene for scene in tell()}
    table = scenes["E arrives"].paged.tables["E"]
    assert table != (7, 2, 15)
    assert str(list(table)) in scenes["E arrives"].paged_told.replace(story.NO_BREAK, " ")
    translation = scenes["Where is token 20 of E?"].translation
    assert translation is not None
    assert translation.address.slot == table[1] * 16 + 4
