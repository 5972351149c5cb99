# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Helper processes of tests: ready once constructed, or the test fails at once with their output."""

from __future__ import annotations

import contextlib
import selectors
import subprocess
import tempfile
import time
from pathlib import Path
from typing import BinaryIO, Callable, Mapping, Optional, Sequence, Union

from tests.lab.system import LabError

#: Reports whether the process with this id is ready.
Condition = Callable[[int], bool]
_POLL_SECONDS = 0.02


class Background:
    """A process that runs until it is closed; a context manager.

    It is ready when it prints the line ``ready`` (a text), or when ``ready`` (a condition) holds. Raises LabError with
    what the process wrote to standard error if it cannot be started, or ends or stays silent for ``timeout`` seconds
    before that. ``log`` is a file that keeps what it writes.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        ready: Union[str, Condition] = "ready",
        timeout: float = 60.0,
        env: Optional[Mapping[str, str]] = None,
        cwd: Optional[str] = None,
        input_pipe: bool = False,
        log: Optional[Path] = None,
    ) -> None:
        self._argv = list(argv)
        # It lives as long as the process.
        self._errors: BinaryIO = open(log, "w+b") if log else tempfile.TemporaryFile()  # noqa: SIM115
        output = subprocess.PIPE if isinstance(ready, str) else self._errors
        try:
            self.process: subprocess.Popen[str] = subprocess.Popen(
                self._argv,
                stdin=subprocess.PIPE if input_pipe else subprocess.DEVNULL,
                stdout=output,
                stderr=self._errors,
                env=env,
                cwd=cwd,
                text=True,
            )
        except OSError as error:
            self._errors.close()
            raise LabError(f"{self._argv[0]} cannot be started: {error.strerror}") from error
        try:
            self._await(ready, timeout)
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """The process id."""
        return self.process.pid

    def _await(self, ready: Union[str, Condition], timeout: float) -> None:
        deadline = time.monotonic() + timeout
        if isinstance(ready, str):
            line = self._line(timeout)
            if line != ready + "\n":
                raise LabError(self._failure(f"instead of {ready!r} it said {line!r}" if line else "it is not ready"))
            return
        while not ready(self.pid):
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise LabError(self._failure("it is not ready"))
            time.sleep(_POLL_SECONDS)
        if self.process.poll() is not None:
            raise LabError(self._failure("it does not last"))

    def _line(self, timeout: float) -> str:
        """Return the first line of its output; empty if it ends or says nothing for so long."""
        assert self.process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            return self.process.stdout.readline() if selector.select(timeout) else ""

    def _failure(self, what: str) -> str:
        # A process that closed its output is about to end.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(1)
        status = self.process.poll()
        state = "it still runs" if status is None else f"it ended with status {status}"
        self._errors.seek(0)
        words = self._errors.read().decode("utf-8", "replace").strip()
        return f"{' '.join(self._argv)}: {what}; {state}: {words[-2000:] or 'no words'}"

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                # No process reads the rest of the input.
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
        self._errors.close()

    def __enter__(self) -> Background:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


def runs_as(name: str) -> Condition:
    """Return the condition that a process has become the program ``name``: a shell needs a moment to execute it."""

    def become(pid: int) -> bool:
        with open(f"/proc/{pid}/cmdline", "rb") as stream:
            return stream.read().split(b"\0")[0] == name.encode()

    return become


def lock_holder(path: Union[str, Path], *, enter: Sequence[str] = (), seconds: str = "infinity") -> Background:
    """Start a program named ``sleep`` that holds a lock of flock(2). ``enter``: a command line that enters its node."""
    return Background([*enter, "flock", "-F", "-x", str(path), "sh", "-c", f"echo ready; exec sleep {seconds}"])
