"""A headless Chromium for tests, driven over a pipe in its own debugging protocol.

Whatever a page does wrong is kept: exceptions, errors on the console, and every address that it
asks for.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

CHROMIUM = next(
    (
        path
        for name in ("chromium", "chromium-browser", "google-chrome")
        if (path := shutil.which(name))
    ),
    None,
)
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-pipe",
)
PATIENCE_S = 60.0

# Chromium reads commands at 3 and writes answers at 4. Placed by a program between, since code of
# ours between fork and exec is not safe where the tests have threads.
PLACE_PIPES = """
import os, sys
to_read, to_write = (os.dup(int(pipe)) for pipe in sys.argv[1:3])
os.dup2(to_read, 3)
os.dup2(to_write, 4)
for pipe in (3, 4):  # which the copies may have been already, and copies close by themselves
    os.set_inheritable(pipe, True)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Browser:
    """One Chromium with one page; use as a context manager."""

    def __enter__(self) -> Browser:
        assert CHROMIUM is not None
        self._profile = tempfile.mkdtemp(prefix="pagedkv-browser-")
        to_read, self._to = os.pipe()
        self._from, to_write = os.pipe()

        self._process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                PLACE_PIPES,
                str(to_read),
                str(to_write),
                CHROMIUM,
                *FLAGS,
                f"--user-data-dir={self._profile}",
                "about:blank",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(to_read, to_write),
            start_new_session=True,
        )
        os.close(to_read)
        os.close(to_write)
        self._buffer = b""
        self._last_id = 0
        self._session: str | None = None
        self.errors: list[str] = []
        self.requests: list[str] = []
        try:
            self._attach()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _attach(self) -> None:
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")

    def __exit__(self, *_: object) -> None:
        os.close(self._to)
        os.close(self._from)
        # only the group that was started here: Chromium is many processes
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        shutil.rmtree(self._profile, ignore_errors=True)

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Send one command and wait for its answer."""
        self._last_id += 1
        message: dict[str, Any] = {"id": self._last_id, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._last_id:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer)

    def open(self, page: Path, *, width: int, height: int, dark: bool, touch: bool = False) -> None:
        """Show a file at a size and in a colour scheme, and wait until its charts are drawn."""
        self.errors.clear()
        self.requests.clear()
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=touch,
        )
        self.send("Emulation.setTouchEmulationEnabled", enabled=touch)
        self.set_dark(dark)
        self.send("Page.navigate", url=page.as_uri())
        self.wait_for("document.documentElement?.dataset.charts !== undefined")

    def set_dark(self, dark: bool) -> None:
        """Prefer dark or light from now on, as a person changing the system's setting."""
        value = "dark" if dark else "light"
        self.send(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": value}],
        )

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        answer = self.send(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"])
        return answer["result"].get("value")

    def wait_for(self, condition: str) -> None:
        """Wait until a JavaScript condition holds."""
        patience_ends = time.monotonic() + PATIENCE_S
        while not self.evaluate(condition):
            if time.monotonic() > patience_ends:
                raise TimeoutError(f"the page never came to: {condition}; {self.errors}")
            time.sleep(0.05)

    def screenshot(self, path: Path) -> None:
        """The whole page as a PNG."""
        answer = self.send("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(answer["data"]))

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            if not select.select([self._from], [], [], PATIENCE_S)[0]:
                raise TimeoutError("Chromium does not answer")
            received = os.read(self._from, 1 << 20)
            if not received:
                raise RuntimeError("Chromium is gone")
            self._buffer += received
        message, self._buffer = self._buffer.split(b"\0", 1)
        answer: dict[str, Any] = json.loads(message)
        return answer

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown":
                self.errors.append(str(params["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.errors.append(str(params["args"]))
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                self.errors.append(params["entry"]["text"])
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])
