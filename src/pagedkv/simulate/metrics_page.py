"""`docs/metrics.md`, made from the definitions: `python -m pagedkv.simulate.metrics_page`."""

from __future__ import annotations

import sys

from pagedkv.simulate.metrics import GROUP_NOTES, definitions_by_group
from pagedkv.simulate.result_json import KEYS
from pagedkv.simulate.what_if_json import KEYS as WHAT_IF_KEYS


def metrics_page() -> str:
    """The whole page as Markdown."""
    lines = [
        "<!-- Made by `python -m pagedkv.simulate.metrics_page > docs/metrics.md`; a test "
        "compares. -->",
        "",
        "# What each metric means",
        "",
        "Tools in this field use the same words for different numbers. These are the definitions "
        "behind the table of `pagedkv simulate`, its `report.html` and its `--json`. "
        "`pagedkv simulate --explain` prints them too.",
        "",
        "A *slot* is the room for the keys and values of one token; a block is `block_size` "
        "slots. A request *runs* while it holds memory, and *waits* from its arrival, or from a "
        "preemption, until it gets some.",
    ]
    for group, definitions in definitions_by_group().items():
        lines += ["", f"## {group}", ""]
        if group in GROUP_NOTES:
            lines += [GROUP_NOTES[group], ""]
        lines += ["| metric | unit | definition | key |", "|---|---|---|---|"]
        lines += [
            f"| {d.label} | {d.unit or '–'} | {d.definition} | `{d.key}` |" for d in definitions
        ]
    lines += [
        "",
        "## Keys of the JSON",
        "",
        "`--json FILE` writes every number. Shares are from 0 to 1, times in seconds, sizes in "
        "bytes, and what was not observed is `null`. Keys may be added; a change of meaning "
        "raises `version`. `[]` stands for the items of a list, `*` for names that vary.",
        "",
        "| key | meaning |",
        "|---|---|",
    ]
    lines += [f"| `{key}` | {meaning} |" for key, meaning in KEYS.items()]
    lines += [
        "",
        "## Keys of the JSON of a what-if",
        "",
        "With `--what-if`, `--json FILE` writes an item of `choices` for each row of the table, in "
        "its order, with every metric of paged memory. Units are as above.",
        "",
        "| key | meaning |",
        "|---|---|",
    ]
    lines += [f"| `{key}` | {meaning} |" for key, meaning in WHAT_IF_KEYS.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(metrics_page())
