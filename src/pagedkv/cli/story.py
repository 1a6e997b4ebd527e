"""The story of `pagedkv walkthrough`, as data: what happens, on the real memory.

Every number in it is read from a `KVCacheManager`, or from the contiguous regions that play the
same arrivals beside it. How it looks is `walkthrough`'s business.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count

from pagedkv.memory import Address, KVCacheManager
from pagedkv.memory.blocks import PUBLISHED
from pagedkv.simulate import regions
from pagedkv.simulate.regions import FIRST_FIT

BLOCK_SIZE = 16
NUM_BLOCKS = 16
LENGTHS = {"A": 12, "B": 60, "C": 28, "D": 124, "E": 40}
"""Tokens of each sequence. With A and C gone, E is longer than any hole that they leave."""

EARLIER = {"u": 32, "v": 16, "w": 80, "x": 112, "y": 16}
"""Tokens of the requests that were there before, and that left in the order `EARLIER_LEAVE`.

They leave the free list shuffled as a server's is after its first minutes, and such that E's
block table becomes [7, 2, 15], the worked example of the documentation."""
EARLIER_LEAVE = "xuvwy"

NO_BREAK = "\N{NO-BREAK SPACE}"

TOKEN = 20
"""The token of E that is looked up."""

LAST_LENGTH, COMMON_TOKENS = 44, 36
"""Tokens of G's prompt, and how many of them, from its beginning, it has in common with E's."""


@dataclass(frozen=True)
class Block:
    """One physical block: the sequences whose tables name it, and what it holds."""

    users: tuple[str, ...]
    num_tokens: int
    cached: bool


@dataclass(frozen=True)
class PagedMemory:
    """All blocks at one moment, and the block table of each living sequence."""

    blocks: tuple[Block, ...]
    tables: dict[str, tuple[int, ...]]

    @property
    def free(self) -> tuple[int, ...]:
        """The blocks that no table names, in order of their ids."""
        return tuple(i for i, block in enumerate(self.blocks) if not block.users)


@dataclass(frozen=True)
class Region:
    """Slots `start` to `stop` (half open): a sequence's, or a hole where `name` is empty."""

    name: str
    start: int
    stop: int

    @property
    def num_slots(self) -> int:
        """How many they are."""
        return self.stop - self.start


@dataclass(frozen=True)
class ContiguousMemory:
    """All regions and holes at one moment, by address, and who was refused for want of a hole."""

    regions: tuple[Region, ...]
    refused: str = ""

    @property
    def holes(self) -> tuple[int, ...]:
        """Slots of each hole, by address."""
        return tuple(region.num_slots for region in self.regions if not region.name)


@dataclass(frozen=True)
class Translation:
    """From one token of a sequence to its slot."""

    name: str
    table: tuple[int, ...]
    num_tokens: int
    block_size: int
    token: int
    address: Address


@dataclass(frozen=True)
class Scene:
    """One step: what happened, the memory after it, and the same in contiguous memory."""

    title: str
    told: str
    paged: PagedMemory
    paged_told: str = ""
    contiguous: ContiguousMemory | None = None
    contiguous_told: str = ""
    translation: Translation | None = None


def tell() -> Iterator[Scene]:
    """Play the story, one scene at a time; the laws of the memory are checked after each.

    Raises `BrokenLaw` if one does not hold.
    """
    stage = _Stage()
    for scene in _scenes(stage):
        stage.kv.verify()
        yield scene


class _Stage:
    """Both memories, and the names of those who live in them."""

    def __init__(self) -> None:
        self.kv = KVCacheManager(NUM_BLOCKS, BLOCK_SIZE)
        self.regions = regions.make_regions(NUM_BLOCKS * BLOCK_SIZE, max_regions=8)
        self.ids = count(1000)
        self.prompts: dict[str, list[int]] = {}
        self.sequences: dict[str, int] = {}
        self.starts: dict[str, int] = {}

    def arrive(self, name: str, num_tokens: int, *, like: str = "", common: int = 0) -> None:
        """Add a sequence whose first `common` tokens are those of `like`, and no others."""
        prompt = self.prompts[like][:common] if like else []
        prompt += self.new_ids(num_tokens - common)
        self.prompts[name] = prompt
        self.sequences[name] = self.kv.add_sequence(prompt)

    def leave(self, name: str) -> None:
        self.kv.free(self.sequences.pop(name))

    def new_ids(self, number: int) -> list[int]:
        return [next(self.ids) for _ in range(number)]

    def arrive_contiguous(self, name: str, num_tokens: int) -> bool:
        start = regions.place(self.regions, FIRST_FIT, num_tokens)
        if start >= 0:
            self.starts[name] = start
        return start >= 0

    def leave_contiguous(self, name: str) -> None:
        regions.remove(self.regions, self.starts.pop(name))

    def table(self, name: str) -> tuple[int, ...]:
        return tuple(self.kv.block_table(self.sequences[name]).tolist())

    def paged(self) -> PagedMemory:
        tables = {name: self.table(name) for name in self.sequences}
        users: list[list[str]] = [[] for _ in range(NUM_BLOCKS)]
        held = [0] * NUM_BLOCKS
        for name, table in tables.items():
            num_tokens = self.kv.num_tokens(self.sequences[name])
            for i, block in enumerate(table):
                users[block].append(name)
                # Of the sequences that share a block, one may be further than the others.
                held[block] = max(held[block], min(num_tokens - i * BLOCK_SIZE, BLOCK_SIZE))
        # The manager tells how many blocks are cached, but not which.
        key_state = self.kv._memory.pool.key_state
        blocks = []
        for block in range(NUM_BLOCKS):
            cached = not users[block] and bool(key_state[block] == PUBLISHED)
            tokens = BLOCK_SIZE if cached else held[block]
            blocks.append(Block(tuple(users[block]), tokens, cached))
        return PagedMemory(tuple(blocks), tables)

    def contiguous(self, refused: str = "") -> ContiguousMemory:
        names = {start: name for name, start in self.starts.items()}
        found = []
        end = 0
        for start, _, granted in zip(*regions.live(self.regions), strict=True):
            if end < start:
                found.append(Region("", end, int(start)))
            end = int(start + granted)
            found.append(Region(names[int(start)], int(start), end))
        if end < NUM_BLOCKS * BLOCK_SIZE:
            found.append(Region("", end, NUM_BLOCKS * BLOCK_SIZE))
        return ContiguousMemory(tuple(found), refused)


def _scenes(stage: _Stage) -> Iterator[Scene]:
    yield _before(stage)
    yield _four_arrive(stage)
    yield _two_leave(stage)
    yield _one_more_arrives(stage)
    yield _translated(stage)
    yield _grown(stage)
    yield _forked(stage)
    yield _found_again(stage)


def _before(stage: _Stage) -> Scene:
    for name, num_tokens in EARLIER.items():
        stage.arrive(name, num_tokens)
    for name in EARLIER_LEAVE:
        stage.leave(name)
    # Whoever takes everything sees the order of the free list; it is the same afterwards, since
    # the block released last is the first to be handed out again.
    stage.arrive("everything", stage.kv.num_blocks * stage.kv.block_size)
    order = stage.table("everything")
    stage.leave("everything")
    num_slots = stage.kv.num_blocks * stage.kv.block_size
    return Scene(
        "An empty memory",
        f"Room for the keys and values of {num_slots} tokens, managed in two ways. Paged, it is "
        f"cut into {stage.kv.num_blocks} blocks of {stage.kv.block_size} slots, and any sequence "
        "can use any block. Contiguous, a sequence gets slots in a row, and here, kinder than "
        "life, exactly as many as it will ever need.",
        stage.paged(),
        f"Of {len(EARLIER)} earlier requests none is left, but the free blocks are no longer in "
        f"order: they are handed out as {_listed(order[:8])} ...",
        stage.contiguous(),
        f"The earlier requests have left one hole of {_and(map(str, stage.contiguous().holes))} "
        "slots, as large as the memory.",
    )


def _four_arrive(stage: _Stage) -> Scene:
    names = "ABCD"
    for name in names:
        stage.arrive(name, LENGTHS[name])
        stage.arrive_contiguous(name, LENGTHS[name])
    paged, contiguous = stage.paged(), stage.contiguous()
    return Scene(
        "A, B, C and D arrive",
        "They have "
        + _and(f"{stage.kv.num_tokens(stage.sequences[name])}" for name in names)
        + " tokens. Each takes the blocks that its tokens fill, the last one perhaps in part; its "
        "block table says which. Above each block stands its number, below it how many tokens "
        "it holds; above each region its first slot, below it how many slots it has.",
        paged,
        "Block tables:\n" + "\n".join(f"{name} {_table(paged.tables[name])}" for name in names),
        contiguous,
        "Slots:\n"
        + "\n".join(
            f"{region.name} {region.start} .. {region.stop - 1}"
            for region in contiguous.regions
            if region.name
        ),
    )


def _two_leave(stage: _Stage) -> Scene:
    for name in "AC":
        stage.leave(name)
        stage.leave_contiguous(name)
    paged, contiguous = stage.paged(), stage.contiguous()
    return Scene(
        "A and C leave",
        "Their memory is free again, in both.",
        paged,
        f"Free: blocks {_and(map(str, paged.free))}, {len(paged.free) * stage.kv.block_size} "
        "slots, for whoever comes.",
        contiguous,
        f"Free: {sum(contiguous.holes)} slots, in holes of {_and(map(str, contiguous.holes))}.",
    )


def _one_more_arrives(stage: _Stage) -> Scene:
    wanted = LENGTHS["E"]
    available = stage.kv.num_available_blocks
    stage.arrive("E", wanted)
    fits = stage.arrive_contiguous("E", wanted)
    paged, contiguous = stage.paged(), stage.contiguous(refused="" if fits else "E")
    table = paged.tables["E"]
    return Scene(
        "E arrives",
        f"E has {wanted} tokens.",
        paged,
        f"E needs {len(table)} blocks of the {available} free ones, side by side or not. It gets "
        f"{_and(map(str, table))}, which A and C left: its block table is {_table(table)}.",
        contiguous,
        f"E needs {wanted} slots in a row. {sum(contiguous.holes)} are free, but the largest hole "
        f"has {max(contiguous.holes)}. E {'fits' if fits else 'does not fit, and waits'}.",
    )


def _translated(stage: _Stage) -> Scene:
    sequence = stage.sequences["E"]
    address = stage.kv.address(sequence, TOKEN)
    table = stage.table("E")
    return Scene(
        f"Where is token {TOKEN} of E?",
        "E sees its cache as contiguous. Its block table says where each part really is.",
        stage.paged(),
        translation=Translation(
            "E", table, stage.kv.num_tokens(sequence), stage.kv.block_size, TOKEN, address
        ),
    )


def _grown(stage: _Stage) -> Scene:
    sequence = stage.sequences["E"]
    before = stage.table("E")
    num_free = 0  # tokens that needed no block
    while stage.table("E") == before:
        stage.kv.extend([sequence], stage.new_ids(1))
        num_free += 1
    num_free -= 1
    return Scene(
        "E writes on, token by token",
        f"The next {num_free} tokens fill block {before[-1]} and take nothing. Token "
        f"{stage.kv.num_tokens(sequence) - 1} has no room there: only now is block "
        f"{stage.table('E')[-1]} taken. Nothing was reserved for it.",
        stage.paged(),
        f"E {_table(stage.table('E'))}",
    )


def _forked(stage: _Stage) -> Scene:
    stage.leave("B")
    available = stage.kv.num_available_blocks
    stage.sequences["F"] = stage.kv.fork(stage.sequences["E"])
    taken = available - stage.kv.num_available_blocks
    num_shared = len(stage.table("F"))
    step = stage.kv.extend([stage.sequences["F"]], stage.new_ids(1))
    source, target = step.copies[0].tolist()
    return Scene(
        "B leaves, E forks, F writes",
        f"F, a second answer to the same prompt, begins as a fork of E: it shares all "
        f"{num_shared} blocks, and {taken} are taken. Then F writes a token. Block {source} is "
        f"E's too, so F first gets its own copy of it, block {target}: copy-on-write. The token "
        f"goes to slot {step.slots[0]}.",
        stage.paged(),
        f"E {_table(stage.table('E'))}\nF {_table(stage.table('F'))}",
    )


def _found_again(stage: _Stage) -> Scene:
    # Until here nobody said that keys and values were computed, so no block could be found by
    # its content, and every block that was left went to the front of the free list.
    stage.kv.commit([stage.sequences["E"]])
    for name in "FE":
        stage.leave(name)
    num_cached = stage.kv.statistics().cached_blocks
    stage.arrive("G", LAST_LENGTH, like="E", common=COMMON_TOKENS)
    sequence = stage.sequences["G"]
    num_hit = stage.kv.num_cached_tokens(sequence)
    table = stage.table("G")
    hits = table[: num_hit // stage.kv.block_size]
    paged = stage.paged()
    waiting = [str(block) for block in paged.free if paged.blocks[block].cached]
    return Scene(
        "E and F leave, G begins as E did",
        f"The {num_cached} full blocks of E keep their content while nobody needs the room. G's "
        f"{stage.kv.num_tokens(sequence)} tokens begin with {COMMON_TOKENS} of E's, so blocks "
        f"{_and(map(str, hits))} are found again: {num_hit} tokens need not be computed, and "
        f"{len(table) - len(hits)} block is taken. Block {_and(waiting)} can still be found.",
        paged,
        f"G {_table(table)}",
    )


def _table(table: tuple[int, ...]) -> str:
    """A block table as one word, which is not broken at the end of a line."""
    return str(list(table)).replace(" ", NO_BREAK)


def _listed(numbers: tuple[int, ...]) -> str:
    return " ".join(map(str, numbers))


def _and(parts: Iterable[str]) -> str:
    *most, last = parts
    return f"{', '.join(most)} and {last}" if most else last
