"""Settings that all tests share."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
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


def _called(test: Callable[..., Any], **arguments: Any) -> Any:
    return test(**arguments)


# CPython keeps the frames of its functions in chunks of 16 KiB, and gives a chunk back as soon as
# it is empty. A test whose inner loop calls from the last frame that fits has one mapped and
# unmapped at each call, which took the tests in Triton's interpreter twice as long: half a million
# times in one of them. A frame as large as this comes with a chunk in which there is room for all
# that it calls.
_called.__code__ = _called.__code__.replace(co_stacksize=1 << 16)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """Call the test with room for the frames of what it calls."""
    test = pyfuncitem.obj
    pyfuncitem.obj = functools.partial(_called, test)
    try:
        return (yield)
    finally:
        pyfuncitem.obj = test
