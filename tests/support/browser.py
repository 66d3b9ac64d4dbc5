"""A real headless browser, driven over a pipe in its debugging protocol."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage --hide-scrollbars --remote-debugging-pipe"
)
_PATIENCE = 120.0  # seconds; a browser starts slowly on a busy machine


def find_browser() -> str | None:
    return next((path for name in _NAMES if (path := shutil.which(name))), None)


class Tab:
    """One page. Its errors and every address it requests are kept."""

    def __init__(self, write_to: int, read_from: int) -> None:
        self._write_to = write_to
        self._read_from = read_from
        self._rest = b""
        self._last = 0
        self._session: str | None = None
        self.complaints: list[str] = []
        self.addresses: list[str] = []

    def attach(self) -> Self:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        return self

    def look(self, path: Path, *, width: int, height: int = 900, dark: bool = False) -> None:
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Page.navigate", url=path.resolve().as_uri())
        deadline = time.monotonic() + _PATIENCE
        while self.ask("location.href + document.readyState") != path.resolve().as_uri() + "complete":
            assert time.monotonic() < deadline, "the page does not load"
            time.sleep(0.05)

    def ask(self, expression: str) -> Any:
        """Return the value of an expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def press(self, key: str, code: int) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    def picture(self, path: Path) -> None:
        """Save a screenshot of the entire page."""
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def paper(self, path: Path) -> None:
        shot = self.call(
            "Page.printToPDF", printBackground=True, preferCSSPageSize=True, paperWidth=8.27, paperHeight=11.69
        )
        path.write_bytes(base64.b64decode(shot["data"]))

    def call(self, method: str, **parameters: object) -> dict[str, Any]:
        self._last += 1
        message: dict[str, object] = {"id": self._last, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write_to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._last:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer)

    def _note(self, event: dict[str, Any]) -> None:
        if event["method"] in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"):
            self.complaints.append(json.dumps(event["params"]))
        if event["method"] == "Network.requestWillBeSent":
            self.addresses.append(event["params"]["request"]["url"])

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._read_from], [], [], _PATIENCE)
            assert ready, "the browser does not answer"
            more = os.read(self._read_from, 1 << 16)
            assert more, "the browser is gone"
            self._rest += more
        message, _, self._rest = self._rest.partition(b"\0")
        answer: dict[str, Any] = json.loads(message)
        return answer


@contextmanager
def open_tab(program: str, profile: Path) -> Iterator[Tab]:
    """Start a browser and yield a tab. It reads commands from file descriptor 3 and answers on 4; a shell connects our
    pipes (bash, because dash supports no descriptor above 9)."""
    to_read, to_write = os.pipe()
    from_read, from_write = os.pipe()
    shell = f'exec "$0" {_FLAGS} --user-data-dir="$1" 3<&{to_read} 4>&{from_write}'
    with (profile.parent / "browser.log").open("wb") as log:
        process = subprocess.Popen(
            ["bash", "-c", shell, program, str(profile)], pass_fds=(to_read, from_write), stdout=log, stderr=log
        )
    os.close(to_read)
    os.close(from_write)
    try:
        yield Tab(to_write, from_read).attach()
    finally:
        os.close(to_write)  # the browser ends when its pipe is closed
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(from_read)
