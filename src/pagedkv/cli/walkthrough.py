"""`pagedkv walkthrough`: how paging works, one step at a time, drawn in the terminal."""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Annotated

import typer

from pagedkv.cli.terminal import console_with

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from pagedkv.cli.story import ContiguousMemory, PagedMemory, Scene, Translation

_COLOURS = {
    # Okabe and Ito's, and grey for D, who only stands by. F and G take the colours of A and B,
    # who have left by then.
    "A": "#0072B2",
    "B": "#56B4E9",
    "C": "#009E73",
    "D": "#B4B9C1",
    "E": "#E69F00",
    "F": "#0072B2",
    "G": "#56B4E9",
}
_BRIGHT = {"B", "D", "E", "G"}
"""Black letters on these, white ones on the others."""

_NAMES = re.compile(r"\b[A-G]\b")
_ASCII = str.maketrans({"─": "-", "·": ".", "×": "x", "▲": "^"})

_TILE = 3  # columns of a block, and one between it and the next
_SLOTS_A_COLUMN = 4  # in contiguous memory, so that blocks and slots are drawn to one scale
_INDENT = 2
_NARROWEST = 36  # of two columns beside each other: a translation needs as much
_GAP = 4  # columns between the two memories
_WIDEST_PROSE = 96


def walkthrough(
    pause: Annotated[
        bool,
        typer.Option("--pause/--no-pause", help="Wait for a key after each step, on a terminal."),
    ] = True,
    colour: Annotated[
        bool,
        typer.Option("--color/--no-color", help="Colours, on a terminal; NO_COLOR works too."),
    ] = True,
) -> None:
    """Explain paging with a small memory, block by block, beside the contiguous way."""
    console = console_with(colour)
    wait = None
    if pause and sys.stdin.isatty() and sys.stdout.isatty():
        wait = _wait_for_key
    show(console, wait=wait)


def show(console: Console, *, wait: Callable[[Console], bool] | None = None) -> None:
    """Draw every scene on `console`, as wide as it is, in ASCII if its encoding has no more.

    `wait` is called between scenes, and the walkthrough ends early where it returns False.
    """
    from pagedkv.cli.story import tell

    scenes = list(tell())
    drawing = _Drawing(console)
    for number, scene in enumerate(scenes, start=1):
        if wait is not None and number > 1 and not wait(console):
            return
        for line in drawing.scene(scene, number, len(scenes)):
            console.print(line, soft_wrap=True)
    for line in drawing.prose(
        "The laws of the memory were checked after every step, and held. The same code, on real "
        "traffic: pagedkv simulate"
    ):
        console.print(line, soft_wrap=True)


def _wait_for_key(console: Console) -> bool:
    """Wait for Enter or space, and say whether to go on: q ends the walkthrough."""
    invitation = "Enter for the next step, q to quit"
    console.print(invitation, style="dim", end="")
    key = ""
    while key not in ("\r", "\n", " ", "q", "Q", "\x1b"):
        try:
            key = typer.getchar()
        except EOFError:
            key = "q"
    console.file.write("\r" + " " * len(invitation) + "\r")
    console.file.flush()
    return key in "\r\n "


class _Drawing:
    """Scenes as lines of text that fit a console."""

    def __init__(self, console: Console) -> None:
        from pagedkv.simulate.palette import SHARED, STYLES

        self._styles = {**STYLES, "shared": SHARED}
        self._colour = console.color_system is not None and not console.no_color
        # A column stays free: some terminals wrap a line that fills them.
        self._width = max(console.width - 1, 2 * _INDENT + 4 * (_TILE + 1))
        try:
            ("".join(map(chr, _ASCII)) + "╳○").encode(console.encoding)
            self._unicode = True
        except UnicodeEncodeError:
            self._unicode = False
        room = self._width - _INDENT
        for per_row in (16, 8):
            panel = per_row * (_TILE + 1)
            self._beside = room >= 2 * max(panel, _NARROWEST) + _GAP
            if self._beside:
                break
        else:
            per_row = 16 if room >= 16 * (_TILE + 1) else 8 if room >= 8 * (_TILE + 1) else 4
        self._per_row = per_row
        self._panel = room
        if self._beside:
            self._panel = min((room - _GAP) // 2, max(per_row * (_TILE + 1), 44))

    def scene(self, scene: Scene, number: int, total: int) -> list[Text]:
        left = [self._words("Paged", "bold"), *self._paged(scene.paged, scene.translation)]
        right: list[Text] = []
        if scene.contiguous is not None:
            left += self._told(scene.paged_told)
            right = [self._words("Contiguous", "bold"), *self._contiguous(scene.contiguous)]
            right += self._told(scene.contiguous_told)
        elif scene.translation is not None:
            right = self._translation(scene.translation)
        else:
            heading = "Block tables" if "\n" in scene.paged_told else "Block table"
            right = [self._words(heading, "bold"), *self._told(scene.paged_told)]
        return [
            *self._title(f"{number} of {total}", scene.title),
            *self.prose(scene.told),
            self._words(""),
            *(self._side_by_side(left, right) if self._beside else self._stacked(left, right)),
            self._words(""),
        ]

    def prose(self, words: str) -> list[Text]:
        """A paragraph, as wide as reads well."""
        width = min(self._width, _WIDEST_PROSE)
        return [self._named(line) for line in textwrap.wrap(words, width)]

    def _title(self, place: str, title: str) -> list[Text]:
        before, named = self._words(f"── {place} ── ", "dim"), self._named(title, "bold")
        rest = self._width - before.cell_len - named.cell_len - 1
        if rest < 0:
            return [before, named]
        return [before.append_text(named).append(" " + self._plain("─") * rest, "dim")]

    def _told(self, words: str) -> list[Text]:
        lines = [
            line
            for paragraph in words.split("\n")
            for line in textwrap.wrap(paragraph, self._panel, break_long_words=False)
        ]
        return [self._words(""), *map(self._named, lines)] if words else []

    def _paged(self, paged: PagedMemory, mark: Translation | None) -> list[Text]:
        lines = []
        for first in range(0, len(paged.blocks), self._per_row):
            row = range(first, min(first + self._per_row, len(paged.blocks)))
            ids, owners, tokens = self._words(""), self._words(""), self._words("")
            for block in row:
                state = paged.blocks[block]
                ids.append(f"{block:^{_TILE}} ", "dim")
                if len(state.users) > 1:
                    label, sign, style = "+".join(state.users), "", self._on("shared")
                elif state.users:
                    label, sign, style = state.users[0], state.users[0], self._of(state.users[0])
                else:
                    kind = "cached" if state.cached else "free"
                    label = sign = self._sign(kind)
                    style = self._on(kind)
                owners.append(self._filled(label, sign, _TILE), style)
                held = str(state.num_tokens) if state.num_tokens else ""
                tokens.append(f"{held:^{_TILE}}", style)
                owners.append(" ")
                tokens.append(" ")
            lines += [ids, owners, tokens]
            if mark is not None and mark.address.block in row:
                place = (mark.address.block - first) * (_TILE + 1) + 1
                arrow = f"{'':{place}}▲ token {mark.token}, slot {mark.address.slot}"
                lines.append(self._words(arrow, "bold"))
        return lines

    def _contiguous(self, memory: ContiguousMemory) -> list[Text]:
        slots_a_row = self._per_row * (_TILE + 1) * _SLOTS_A_COLUMN
        lines = []
        for first in range(0, memory.regions[-1].stop, slots_a_row):
            starts, owners, sizes = "", self._words(""), self._words("")
            for region in memory.regions:
                start = max(region.start, first)
                stop = min(region.stop, first + slots_a_row)
                width = (stop - start) // _SLOTS_A_COLUMN
                if width <= 0:
                    continue
                place = owners.cell_len
                if not starts or len(starts) < place:
                    starts = f"{starts:{place}}{start}"
                if region.name:
                    label = sign = region.name
                    style = self._of(region.name)
                else:
                    kind = "unusable" if memory.refused else "free"
                    label = sign = self._sign(kind)
                    style = self._on(kind)
                # Of a region on two rows only the larger part says how large the whole is.
                others = region.num_slots - (stop - start)
                larger = stop - start > others or (stop - start == others and first == start == 0)
                owners.append(self._filled(label, sign, width), style)
                sizes.append(f"{region.num_slots if larger else '':^{width}}", style)
            lines += [self._words(starts, "dim"), owners, sizes]
        return lines

    def _translation(self, translation: Translation) -> list[Text]:
        table, token, size = translation.table, translation.token, translation.block_size
        logical, block, offset, slot = translation.address
        stops = [min((i + 1) * size, translation.num_tokens) for i in range(len(table))]
        rows = {
            "token": [f"{i * size}..{stop - 1}" for i, stop in enumerate(stops)],
            "logical": [str(i) for i in range(len(table))],
            "block table": [str(entry) for entry in table],
        }
        lines = []
        for name, cells in rows.items():
            line = self._words(f"{name:12}", "dim")
            for i, cell in enumerate(cells):
                line.append(f"{cell:^7}", self._of(translation.name) if i == logical else "")
                line.append(" ")
            lines.append(line)
        steps = [
            f"1. {token} // {size} = {logical}, the logical block",
            f"2. table[{logical}] = {block}, the block",
            f"3. {token} % {size} = {offset}, the offset in it",
            f"4. {block} × {size} + {offset} = {slot}, the slot",
        ]
        return [*lines, self._words(""), *map(self._words, steps)]

    def _side_by_side(self, left: list[Text], right: list[Text]) -> Iterable[Text]:
        for i in range(max(len(left), len(right))):
            line = self._words(" " * _INDENT)
            if i < len(left):
                line.append_text(left[i])
            if i < len(right):
                line.append(" " * (_INDENT + self._panel + _GAP - line.cell_len))
                line.append_text(right[i])
            yield self._trimmed(line)

    def _stacked(self, upper: list[Text], lower: list[Text]) -> Iterable[Text]:
        for part in [*upper, self._words(""), *lower]:
            line = self._words(" " * _INDENT)
            line.append_text(part)
            yield self._trimmed(line)

    def _trimmed(self, line: Text) -> Text:
        if not self._colour:  # where there is, a space may be the end of a block
            line.rstrip()
        return line

    def _filled(self, label: str, sign: str, width: int) -> str:
        """`label` in the middle, or where there is no colour to fill with, `sign` all over."""
        if self._colour and label in _COLOURS:
            return f"{label:^{width}}"
        return sign * width if sign else f"{label:^{width}}"

    def _sign(self, kind: str) -> str:
        style = self._styles[kind]
        return style.sign if self._unicode else style.ascii_sign

    def _on(self, kind: str) -> str:
        colour = self._styles[kind].terminal
        return f"bold #000000 on {colour}" if kind == "shared" else colour

    def _of(self, name: str) -> str:
        letters = "#000000" if name in _BRIGHT else "#FFFFFF"
        return f"bold {letters} on {_COLOURS[name]}"

    def _plain(self, words: str) -> str:
        return words if self._unicode else words.translate(_ASCII)

    def _words(self, words: str, style: str = "") -> Text:
        from rich.text import Text

        line = Text()
        line.append(self._plain(words).replace("\N{NO-BREAK SPACE}", " "), style)
        return line

    def _named(self, words: str, style: str = "") -> Text:
        """Words in which the names of sequences have their colours."""
        line = self._words(words, style)
        for match in _NAMES.finditer(line.plain):
            line.stylize(self._of(match[0]), match.start(), match.end())
        return line
