"""A headless Chromium, driven through its DevTools protocol over a pipe: no driver and no package needed."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--no-first-run", "--hide-scrollbars"),
    "--remote-debugging-pipe",
)
PATIENCE = 60.0  # seconds for any one answer


def chromium() -> str | None:
    """The program, if it is installed."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Browser:
    """One browser with one page, in a profile of its own."""

    def __init__(self, profile: Path) -> None:
        program = chromium()
        assert program, "no chromium here: `make browser` installs it"
        # Chromium reads commands from its descriptor 3 and writes answers to 4; both end with a NUL.
        inner_in, self._out = os.pipe()
        self._in, inner_out = os.pipe()
        command = f'exec "$0" "$@" 3<&{inner_in} 4>&{inner_out}'
        self._process = subprocess.Popen(
            ["bash", "-c", command, program, *OPTIONS, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(inner_in, inner_out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(inner_in)
        os.close(inner_out)
        self._buffer, self._number, self._session, self._url = b"", 0, None, ""
        self.events: list[dict[str, Any]] = []
        self._session = self._attach()
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def _attach(self) -> str:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session: str = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        return session

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._out)  # Chromium ends when its pipe does
        os.close(self._in)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The answer to one command; events that come before it are kept."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def _read(self) -> dict[str, Any]:
        deadline = time.monotonic() + PATIENCE
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"Chromium gave no answer within {PATIENCE:.0f} s"
            piece = os.read(self._in, 1 << 20)
            assert piece, "Chromium has ended"
            self._buffer += piece
        message, _, self._buffer = self._buffer.partition(b"\0")
        decoded: dict[str, Any] = json.loads(message)
        return decoded

    def show(self, width: int, scheme: str) -> None:
        """Sets the width of the window, and light or dark."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False
        )
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def open(self, url: str) -> list[str]:
        """Opens a page, and returns what went wrong while it loaded."""
        self.events.clear()
        self.call("Page.navigate", url=url)
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._read())
        self._url = url
        return self.after_a_frame()

    def after_a_frame(self) -> list[str]:
        """Waits until the page is drawn, and returns what has gone wrong since it was opened."""
        self.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
        return [found for event in self.events for found in _complaints(event, self._url)]

    def evaluate(self, expression: str) -> Any:
        answer = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def screenshot(self, path: Path, whole: bool = False) -> None:
        data = self.call("Page.captureScreenshot", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(data))


def _complaints(event: dict[str, Any], url: str) -> Sequence[str]:
    """Errors and warnings of the console, and requests that leave the server of the page."""
    method, told = event.get("method"), event.get("params", {})
    if method == "Runtime.exceptionThrown":
        return [str(told["exceptionDetails"])]
    if method == "Runtime.consoleAPICalled" and told["type"] in ("error", "warning", "assert"):
        return [str(told["args"])]
    if method == "Log.entryAdded" and told["entry"]["level"] in ("error", "warning"):
        return [f"{told['entry']['text']} {told['entry'].get('url', '')}"]
    if method == "Network.requestWillBeSent":
        asked, home = told["request"]["url"], "/".join(url.split("/")[:3])
        return [] if asked.startswith((f"{home}/", "data:", "blob:")) else [f"asks for {asked}"]
    return []
