"""A real headless Chromium, driven through ChromeDriver's own protocol (W3C
WebDriver): HTTP and JSON, no library.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import requests

FLAGS = (
    *(
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--hide-scrollbars",
    ),
    *(
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--disable-dev-shm-usage",
    ),
)


class Browser:
    """One window."""

    def __init__(self, client: requests.Session, session: str) -> None:
        self.client = client
        self.session = session

    def command(self, path: str, **values: object) -> Any:
        answer = self.client.post(f"{self.session}/{path}", json=values, timeout=300)
        assert answer.ok, answer.text
        return answer.json()["value"]

    def open(self, address: str) -> None:
        self.command("url", url=address)

    def run(self, script: str) -> Any:
        """Run a script in the page and return its result."""
        return self.command("execute/sync", script=script, args=[])

    def until(self, condition: str) -> None:
        """Wait until an expression of the page is true: the effect of a key or a click may come
        with the next frame.
        """
        script = (
            f"const done = arguments[0]; (function look() {{ ({condition}) ? done() :"
            " setTimeout(look, 10); })();"
        )
        self.command("execute/async", script=script, args=[])

    def devtools(self, method: str, **values: object) -> Any:
        return self.command("goog/cdp/execute", cmd=method, params=values)

    def size(self, width: int, height: int) -> None:
        """Be a screen of this size; windows have a least width, phones have less."""
        self.devtools(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )

    def colours(self, scheme: str) -> None:
        """Be set to ``dark`` or ``light``."""
        self.devtools(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": scheme}],
        )


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """Give a window of a Chromium with a profile of its own; skip where there is none."""
    driver = shutil.which("chromedriver", path="/usr/bin:/usr/local/bin")
    chromium = shutil.which("chromium", path="/usr/bin:/usr/local/bin")
    if driver is None or chromium is None:
        pytest.skip(
            "NOT TESTED: no chromium and chromedriver here (tools/set-up-peers installs Debian's)"
        )
    with (
        subprocess.Popen(
            (driver, "--port=0"), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process,
        requests.Session() as client,
    ):
        try:
            assert process.stdout is not None
            port = next(
                line.rsplit(" ", 1)[1].strip(".\n")
                for line in process.stdout
                if "successfully on port" in line
            )
            options = {
                "binary": chromium,
                "args": [*FLAGS, f"--user-data-dir={folder / 'profile'}"],
            }
            capabilities = {"alwaysMatch": {"goog:chromeOptions": options}}
            root = f"http://127.0.0.1:{port}/session"
            # No proxy of this machine stands between us and our own child.
            client.trust_env = False
            answer = client.post(root, json={"capabilities": capabilities}, timeout=300)
            assert answer.ok, answer.text
            session = f"{root}/{answer.json()['value']['sessionId']}"
            try:
                yield Browser(client, session)
            finally:
                client.delete(session, timeout=300)
        finally:
            process.terminate()
