"""`pagedkv simulate` of the whole Mooncake conversation trace, as a user runs it: one process.

Block size 16, paged, with scheduling and decode; the compiled code is loaded, not made.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from peers import TRACES, report

RUNS = 5


def main() -> None:
    trace = TRACES / "mooncake_conversation.jsonl"
    if not trace.exists():
        print(f"no traces at {TRACES}: nothing to measure")
        return
    seconds, peak_mib = [], []
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pagedkv", "simulate", str(trace), "--scheme", "paged"]
        command += ["--report", str(Path(folder) / "report.html")]
        for _ in range(RUNS + 1):
            start = time.perf_counter()
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
            _, status, usage = os.wait4(process.pid, 0)
            if status != 0:
                raise SystemExit("pagedkv simulate failed")
            seconds.append(time.perf_counter() - start)
            peak_mib.append(usage.ru_maxrss / 1024)
    report("simulate, Mooncake conversation", seconds[1:], [], unit="s", bar="under 10 s")
    report("its memory", peak_mib[1:], [], unit="MiB", bar="at most 1,536 MiB")


if __name__ == "__main__":
    main()
