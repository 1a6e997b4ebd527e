"""Settings that all tests share."""

from __future__ import annotations

import os
from pathlib import Path

from hypothesis import HealthCheck, settings

# Without a GPU, kernels run in Triton's interpreter, which has to be said before anything imports
# triton, as transformers does.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# No deadline: the first example of a run may be the one that compiles.
settings.register_profile("default", deadline=None)
# The same examples each time, so that a red run is the change's fault.
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
# Plain Python is about a hundred times slower than compiled code.
settings.register_profile(
    "uncompiled",
    deadline=None,
    derandomize=True,
    max_examples=15,
    stateful_step_count=20,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile(
    os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "default")
)
