"""Draw the two pictures of the documentation as SVG, next to this file.

The colours of memory are those of `pagedkv.simulate.palette`.

Run it with `python docs/images/draw.py` after changing a number here. The files adapt to light
and dark pages by themselves, so they hold no background.
"""

from __future__ import annotations

from pathlib import Path
from xml.sax.saxutils import escape

HERE = Path(__file__).parent

STYLE = """
  text { font: 14px system-ui, sans-serif; fill: #1f2328; }
  .small { font-size: 12px; fill: #59636e; }
  .strong { font-weight: 600; }
  .inside { fill: #ffffff; font-weight: 600; }
  .line { stroke: #59636e; fill: none; stroke-width: 1.5; }
  .box { stroke: #59636e; stroke-width: 1; fill: #59636e22; }
  .mine { stroke: #0b5cad; stroke-width: 1; fill: #2f81d6; }
  .other { stroke: #59636e; stroke-width: 1; fill: #59636e44; }
  .token { fill: #d1480b; }
  .path { stroke: #d1480b; fill: none; stroke-width: 2; }
  .on_bright { fill: #1f2328; font-weight: 600; }
  .token_states { fill: #0072b2; }
  .reserved { fill: #56b4e9; }
  .never_used { fill: #e69f00; }
  .unusable { fill: #d55e00; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3; }
    .small { fill: #9da7b1; }
    .inside { fill: #ffffff; }
    .on_bright { fill: #1f2328; }
    .line { stroke: #9da7b1; }
    .box { stroke: #9da7b1; fill: #9da7b122; }
    .other { stroke: #9da7b1; fill: #9da7b144; }
    .token { fill: #ff8a4c; }
    .path { stroke: #ff8a4c; }
  }
"""


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, kind: str) -> str:
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" class="{kind}"/>'
    )


def save(name: str, width: int, height: int, title: str, parts: list[str]) -> None:
    body = "\n  ".join(parts)
    (HERE / name).write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img" aria-label="{escape(title)}">\n'
        f"  <style>{STYLE}  </style>\n  {body}\n</svg>\n",
        encoding="utf-8",
    )


def draw_paging() -> None:
    """Block table [7, 2, 15], block size 16: token 20 is in slot 36."""
    table = [7, 2, 15]
    token, block_size = 20, 16
    index, offset = divmod(token, block_size)

    parts = [
        text(20, 24, "What the sequence sees", "strong"),
        text(20, 42, "40 tokens in a row", "small"),
        text(332, 24, "Block table", "strong"),
        text(332, 42, "one int a block", "small"),
        text(500, 24, "What the memory holds", "strong"),
        text(500, 42, "16 physical blocks of 16 slots", "small"),
    ]
    row_y = [66, 146, 226]
    for logical, physical in enumerate(table):
        y = row_y[logical]
        first, last = logical * block_size, logical * block_size + block_size - 1
        parts.append(text(20, y, f"logical block {logical}", "small"))
        used = min(40 - first, block_size)
        for cell in range(block_size):
            kind = "mine" if cell < used else "box"
            parts.append(box(20 + cell * 15, y + 8, 13, 22, kind))
        parts.append(text(20, y + 45, f"tokens {first} to {min(last, 39)}", "small"))
        parts.append(box(338, y + 4, 56, 30, "mine"))
        parts.append(text(366, y + 24, str(physical), "inside", "middle"))
        parts.append(
            f'<path d="M262 {y + 19} H336" class="{"path" if logical == index else "line"}"/>'
        )

    # physical blocks: 2 columns of 8, block b at column b // 8
    def place(block: int) -> tuple[float, float]:
        return 500 + (block // 8) * 150, 60 + (block % 8) * 27

    for block in range(16):
        x, y = place(block)
        parts.append(text(x + 18, y + 15, str(block), "small", "end"))
        parts.append(box(x + 24, y, 112, 20, "mine" if block in table else "other"))
    for logical, physical in enumerate(table):
        x, y = place(physical)
        kind = "path" if logical == index else "line"
        # the second column is reached below the first one
        if physical < 8:
            parts.append(f'<path d="M396 {row_y[logical] + 19} L{x + 2} {y + 10}" class="{kind}"/>')
        else:
            parts.append(
                f'<path d="M396 {row_y[logical] + 19} L500 284 H{x - 6} L{x + 2} {y + 14}" '
                f'class="{kind}"/>'
            )

    parts.append(box(20 + offset * 15, row_y[index] + 8, 13, 22, "token"))
    x, y = place(table[index])
    parts.append(box(x + 24 + offset * 7, y, 7, 20, "token"))
    slot = table[index] * block_size + offset
    parts.append(
        text(
            20,
            318,
            f"token {token}  →  logical block {index}, offset {offset}  →  physical block "
            f"{table[index]}  →  slot {table[index]} × {block_size} + {offset} = {slot}",
            "strong",
        )
    )
    save("paging.svg", 800, 334, "A block table maps logical blocks to physical blocks", parts)


def draw_where_memory_goes() -> None:
    """Shares of the KV memory, percent: the published figures, not ours."""
    kinds = [
        ("token_states", "token states"),
        ("reserved", "reserved for tokens to come"),
        ("never_used", "reserved and never used"),
        ("unusable", "free but unusable, and the rest"),
    ]
    schemes = [
        ("reserve the maximum", [20.4, 13.3, 57.3, 8.9]),
        ("reserve a power of two", [26.8, 17.9, 13.6, 41.6]),
        ("reserve the exact length", [38.2, 25.2, 0.0, 36.6]),
        ("paged", [96.3, 0.0, 0.0, 3.7]),
    ]
    left, width, height, gap = 190, 580, 34, 14
    parts = []
    for row, (scheme, shares) in enumerate(schemes):
        y = 12 + row * (height + gap)
        parts.append(text(left - 12, y + 22, scheme, "strong" if scheme == "paged" else "", "end"))
        x = float(left)
        for (kind, _), share in zip(kinds, shares, strict=True):
            span = width * share / 100
            if span > 0:
                parts.append(box(x, y, span, height, kind))
            ink = "on_bright" if kind in ("reserved", "never_used") else "inside"
            if span > 40:
                parts.append(text(x + span / 2, y + 22, f"{share:.0f} %", ink, "middle"))
            x += span
    y = 12 + len(schemes) * (height + gap) + 8
    x = 20.0
    for kind, words in kinds:
        parts.append(box(x, y, 13, 13, kind))
        parts.append(text(x + 19, y + 11, words, "small"))
        x += 36 + 6.1 * len(words)
    save("where-memory-goes.svg", 800, y + 26, "Where the KV memory goes, by scheme", parts)


if __name__ == "__main__":
    draw_paging()
    draw_where_memory_goes()
