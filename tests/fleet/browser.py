# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Headless Chromium, controlled through a pipe by the Chrome DevTools Protocol; no driver is needed."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from queue import Empty, Queue
from typing import Any, Optional

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--force-device-scale-factor=1",
    "--remote-debugging-pipe",
)
# Far longer than any call takes, for busy machines.
PATIENCE_SECONDS = 180.0
# The browser reads commands from its file descriptor 3 and writes answers to 4.
_LAUNCH = (
    "import fcntl, os, sys\n"
    "pipes = [fcntl.fcntl(int(number), fcntl.F_DUPFD, 10) for number in sys.argv[1:3]]\n"
    "os.dup2(pipes[0], 3)\n"
    "os.dup2(pipes[1], 4)\n"
    "os.execv(sys.argv[3], sys.argv[3:])\n"
)


class BrowserError(Exception):
    """The browser is missing, has exited or refuses a command."""


def program() -> str:
    """Return the path of the browser. Raises BrowserError."""
    for name in PROGRAMS:
        found = shutil.which(name)
        if found:
            return found
    raise BrowserError("chromium is not installed: apt-get install chromium")


class Browser:
    """A browser with one page; a context manager. ``complaints`` holds console messages and uncaught errors."""

    def __init__(self, width: int = 1440, height: int = 1000) -> None:
        self.size = (width, height)
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self._number = 0
        self._session: Optional[str] = None
        self._messages: Queue[Optional[dict[str, Any]]] = Queue()
        self._loaded = False
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Browser:
        profile = self._stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
        log = self._stack.enter_context(open(Path(profile) / "log", "wb"))
        commands_out, commands_in = os.pipe()
        answers_out, answers_in = os.pipe()
        argv = [program(), *FLAGS, f"--user-data-dir={profile}/user", f"--window-size={self.size[0]},{self.size[1]}"]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _LAUNCH, str(commands_out), str(answers_in), *argv, "about:blank"],
            pass_fds=(commands_out, answers_in),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        os.close(commands_out)
        os.close(answers_in)
        self._commands = os.fdopen(commands_in, "wb", buffering=0)
        self._reader = threading.Thread(target=self._read, args=(answers_out,), daemon=True)
        self._reader.start()
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        # Focus events are sent even if the window system does not focus this window.
        self.call("Emulation.setFocusEmulationEnabled", enabled=True)
        self.resize(*self.size)
        return self

    def __exit__(self, *_exception: object) -> None:
        with contextlib.suppress(BrowserError, OSError):
            self._session = None
            self.call("Browser.close")
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, 9)
            self._process.wait()
        self._commands.close()
        self._reader.join()
        self._stack.close()

    def _read(self, descriptor: int) -> None:
        with os.fdopen(descriptor, "rb") as stream:
            data = b""
            while part := os.read(stream.fileno(), 1 << 16):
                *whole, data = (data + part).split(b"\0")
                for message in whole:
                    self._messages.put(json.loads(message))
        self._messages.put(None)

    def _next(self) -> dict[str, Any]:
        try:
            message = self._messages.get(timeout=PATIENCE_SECONDS)
        except Empty:
            raise BrowserError(f"the browser has said nothing for {PATIENCE_SECONDS:g} seconds") from None
        if message is None:
            raise BrowserError("the browser has gone")
        self._notice(message)
        return message

    def _notice(self, message: dict[str, Any]) -> None:
        method, values = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            details = values["exceptionDetails"]
            self.complaints.append(details.get("exception", {}).get("description") or details["text"])
        elif method == "Runtime.consoleAPICalled":
            self.complaints.append(f"console: {json.dumps(values['args'])}")
        elif method == "Log.entryAdded":
            self.complaints.append(f"log: {values['entry']['text']}")
        elif method == "Page.javascriptDialogOpening":
            self.complaints.append(f"dialog: {values['message']}")
        elif method == "Network.requestWillBeSent":
            self.requests.append(values["request"]["url"])
        elif method == "Page.loadEventFired":
            self._loaded = True

    def call(self, method: str, **values: Any) -> dict[str, Any]:
        """Send a command and return its answer. Raises BrowserError."""
        self._number += 1
        number = self._number
        command: dict[str, Any] = {"id": number, "method": method, "params": values}
        if self._session:
            command["sessionId"] = self._session
        self._commands.write(json.dumps(command).encode() + b"\0")
        while True:
            message = self._next()
            if message.get("id") == number:
                if "error" in message:
                    raise BrowserError(f"{method}: {message['error']['message']}")
                return dict(message["result"])

    def open(self, path: Path) -> None:
        """Load a file and wait until the page has loaded."""
        self._loaded = False
        self.complaints.clear()
        self.requests.clear()
        self.call("Page.navigate", url=path.resolve().as_uri())
        while not self._loaded:
            self._next()

    def run(self, expression: str) -> Any:
        """Return the value of a JavaScript expression as JSON."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise BrowserError(f"{expression}: {answer['exceptionDetails']['exception']['description']}")
        return answer["result"].get("value")

    def press(self, key: str) -> None:
        """Press and release a key by its name, such as ArrowRight."""
        codes = {"ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40, "Escape": 27, "End": 35, "Home": 36}
        codes.update({"Tab": 9, " ": 32, "Enter": 13})
        named = {"key": key, "code": key, "windowsVirtualKeyCode": codes[key]}
        self.call("Input.dispatchKeyEvent", type="rawKeyDown", **named)
        if key == "Enter":
            self.call("Input.dispatchKeyEvent", type="char", text="\r", **named)
        self.call("Input.dispatchKeyEvent", type="keyUp", **named)

    def write(self, text: str) -> None:
        """Type a text into the focused element."""
        self.call("Input.insertText", text=text)

    def emulate(self, media: str = "", scheme: str = "light") -> None:
        """Emulate the media type (``print``) and the colour scheme."""
        self.call(
            "Emulation.setEmulatedMedia", media=media, features=[{"name": "prefers-color-scheme", "value": scheme}]
        )

    def resize(self, width: int, height: int) -> None:
        """Resize the window."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def picture(self) -> bytes:
        """Return a PNG picture of the window."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])
