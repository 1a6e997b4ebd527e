"""Other people's software on the same work, in the same run.

The scripts that drive it are kept beside the project, in `../shared/peers`, and run in an
environment of their own, made by `../shared/peers/setup.sh DIR`; set `PAGEDKV_PEERS=DIR` to use it.
Without one, a benchmark prints our figure and says that there is nothing to compare it with.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from statistics import median

SHARED = Path(__file__).parents[2] / "shared"
TRACES = SHARED / "traces"


def peer_figure(script: str, *arguments: str, pattern: str) -> float | None:
    """The number that `pattern`'s group finds in what a peer's script prints; None without peer."""
    python = Path(os.environ.get("PAGEDKV_PEERS", "")) / "bin" / "python"
    if "PAGEDKV_PEERS" not in os.environ or not (SHARED / "peers" / script).exists():
        return None
    done = subprocess.run(
        [python, f"peers/{script}", *arguments],
        cwd=SHARED,
        check=True,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    match = re.search(pattern, done.stdout)
    if match is None:
        raise SystemExit(f"{script} printed no figure: {done.stdout!r}")
    return float(match[1])


def report(
    name: str,
    ours: list[float],
    peers: list[float | None],
    *,
    unit: str,
    bar: str,
    better: str = "more",
) -> None:
    """Print medians and their ratio; runs of ours and the peer's took turns."""
    mine = median(ours)
    spread = f"{min(ours):.4g} to {max(ours):.4g}"
    print(f"{name}\n  ours   {mine:10.4g} {unit}   ({len(ours)} runs, {spread})")
    theirs = [figure for figure in peers if figure is not None]
    if theirs:
        peer = median(theirs)
        ratio = mine / peer if better == "more" else peer / mine
        print(f"  peer   {peer:10.4g} {unit}   (vLLM, {len(theirs)} runs)")
        print(f"  ratio  {ratio:10.1f} times")
    else:
        print("  peer   none here: set PAGEDKV_PEERS, see benchmarks/peers.py")
    print(f"  bar    {bar}")
