"""A page in headless Chromium, which is told what to do over two pipes (--remote-debugging-pipe)."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from tests.support.server_process import eventually

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--remote-debugging-pipe"),
)

Scheme = Literal["light", "dark"]


class Page:
    """One page. Made by `open_page`."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to_browser = to_browser
        self._from_browser = os.fdopen(from_browser, "rb")
        self._num_asked = 0
        self._session: str | None = None
        self.complaints: list[str] = []
        """What the browser had to say of the page: errors, and what its policy forbids."""

    def open(self) -> None:
        """An empty one."""
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Log", "Runtime"):
            self.ask(f"{domain}.enable")

    def show(self, *, scheme: Scheme, width: int, height: int = 800) -> None:
        """How whoever looks likes it, and how large the window is: the page that is there changes, too."""
        media = [{"name": "prefers-color-scheme", "value": scheme}]
        self.ask("Emulation.setEmulatedMedia", features=media)
        self.ask(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def go(self, url: str) -> None:
        """To another page, in place of the one that is there. Returns before all of it is."""
        self.ask("Page.navigate", url=url)

    def evaluate(self, script: str) -> Any:
        """The value of that JavaScript, in the page."""
        return self.ask("Runtime.evaluate", expression=script, returnByValue=True)["result"].get("value")

    def await_true(self, script: str) -> bool:
        """Whether it came true in time."""
        return eventually(lambda: bool(self.evaluate(script)))

    def screenshot(self, path: Path) -> None:
        """All of the page, as PNG."""
        taken = self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(taken["data"]))

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A command of the Chrome DevTools Protocol (chromedevtools.github.io/devtools-protocol) and its answer."""
        self._num_asked += 1
        asked: dict[str, Any] = {"id": self._num_asked, "method": method, "params": parameters}
        if self._session is not None:
            asked["sessionId"] = self._session
        os.write(self._to_browser, json.dumps(asked).encode() + b"\0")
        while True:
            told = json.loads(self._message())
            is_error = told.get("method") == "Runtime.consoleAPICalled" and told["params"]["type"] == "error"
            if is_error or told.get("method") in ("Log.entryAdded", "Runtime.exceptionThrown"):
                self.complaints.append(json.dumps(told["params"]))
            if told.get("id") == self._num_asked:
                assert "error" not in told, told
                answer: dict[str, Any] = told["result"]
                return answer

    def _message(self) -> bytes:
        message = bytearray()
        while (byte := self._from_browser.read(1)) != b"\0":
            assert byte, "the browser has ended"
            message += byte
        return bytes(message)

    def close(self) -> None:
        os.close(self._to_browser)
        self._from_browser.close()


@contextlib.contextmanager
def open_page(url: str, *, scheme: Scheme = "light", width: int = 1216, height: int = 800) -> Iterator[Page]:
    """REQUIRES: PROGRAM is there."""
    assert PROGRAM is not None
    (read_there, write_here), (read_here, write_there) = os.pipe(), os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        its = [fcntl.fcntl(one, fcntl.F_DUPFD_CLOEXEC, 10) for one in (read_there, write_there)]  # none of them 3 or 4
        os.close(read_there)
        os.close(write_there)
        command = ["bash", "-c", f'exec "$@" 3<&{its[0]} 4>&{its[1]}', "bash", PROGRAM, *FLAGS]
        browser = subprocess.Popen([*command, f"--user-data-dir={folder}"], pass_fds=its, stderr=subprocess.DEVNULL)
        for one in its:
            os.close(one)
        page = Page(write_here, read_here)
        try:
            page.open()
            page.show(scheme=scheme, width=width, height=height)
            page.go(url)
            yield page
        finally:
            page.close()  # whereupon it ends
            browser.wait(60)
