"""One colour, one sign and one name for each kind of memory, wherever it is drawn.

The colours are those of Okabe and Ito ("Color Universal Design", 2008), which people with any
of the common forms of colour blindness can tell apart. Only "free" is not one of them: it has to
recede, so it is a grey near the background. The signs carry the same distinction where there is
no colour at all: a pipe, a monochrome terminal, a printed page.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources


@dataclass(frozen=True)
class KindStyle:
    """How one kind of memory looks.

    `light` and `dark` are the colours on a light and on a dark page; `terminal` is readable on
    both. `sign` stands for the kind where there is no colour, `ascii_sign` where there is no
    Unicode either.
    """

    key: str
    label: str
    light: str
    dark: str
    terminal: str
    sign: str
    ascii_sign: str


STYLES: dict[str, KindStyle] = {
    style.key: style
    for style in (
        KindStyle("token_states", "Token states", "#0072B2", "#0072B2", "#0072B2", "█", "#"),
        KindStyle("reserved", "Reserved for later", "#56B4E9", "#56B4E9", "#56B4E9", "▓", "+"),
        KindStyle("never_used", "Reserved, never used", "#E69F00", "#E69F00", "#E69F00", "▒", "x"),
        KindStyle("unusable", "Free but unusable", "#D55E00", "#D55E00", "#D55E00", "╳", "!"),
        KindStyle("cached", "Cached, reusable", "#009E73", "#009E73", "#009E73", "○", "c"),
        KindStyle("free", "Free", "#DFE3E8", "#343B46", "#8A8F98", "·", "."),
    )
}
"""kind -> style, in the order of `results.KINDS`."""

SHARED = KindStyle("shared", "Token states, shared", "#CC79A7", "#CC79A7", "#CC79A7", "◆", "s")
"""Token states that several sequences use at once: a mark on the memory map, not a kind."""


def base_stylesheet(prefix: str = "") -> str:
    """What every page of ours begins with, as CSS: its colours, light and dark, and its type.

    The colour of a kind is a variable by its key, `--cached`, or with `prefix` before the key.
    """
    kinds = (*STYLES.values(), SHARED)
    light = " ".join(f"--{prefix}{kind.key}: {kind.light};" for kind in kinds)
    dark = " ".join(f"--{prefix}{kind.key}: {kind.dark};" for kind in kinds)
    assets = resources.files("pagedkv.simulate") / "report_assets"
    return (
        (assets / "base.css").read_text("utf-8")
        + f":root {{ {light} }}\n"
        + f"@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n"
    )
