# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Find other programs and run them."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from typing import BinaryIO, NamedTuple, Optional, Sequence

from ..base.errors import KernelError
from ..base.progress import Progress, unheeded

_SBIN = ("/usr/local/sbin", "/usr/sbin", "/sbin")
# A PATH with this program contains the directories of system programs.
_USUAL = "iptables"


class Completed(NamedTuple):
    """The result of a program that ended: exit status and its two outputs; ``process`` is its process number."""

    status: int
    output: str
    errors: str
    process: int = 0


#: While a program runs, progress is reported at this interval: the wait is bounded, so a long one is not a hang.
PULSE_SECONDS = 1.0


def run(
    command: Sequence[str], text: Optional[str] = None, timeout: float = 300.0, progress: Progress = unheeded
) -> Completed:
    """Run a program with ``text`` on its input and return its result.

    ``progress`` is called every second until the program ends. Raises KernelError if the program cannot be started or
    does not end within ``timeout`` seconds.
    """
    environment = {**os.environ, "LC_ALL": "C", "LANG": "C"}
    try:
        with (
            _readable(text or "") as stdin,
            subprocess.Popen(
                list(command), stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
            ) as child,
        ):
            try:
                output, errors = _outputs(child, timeout, progress)
            except BaseException:
                child.kill()
                raise
    except subprocess.TimeoutExpired:
        raise KernelError(f"{command[0]}: did not end within {timeout:g} seconds") from None
    except OSError as error:
        raise KernelError(f"{command[0]}: cannot be run: {error.strerror}") from None
    return Completed(child.returncode, output.decode(errors="replace"), errors.decode(errors="replace"), child.pid)


def _readable(text: str) -> BinaryIO:
    """Return a file in memory that holds a text: unlike a pipe, it does not block when the program reads slowly."""
    file = os.fdopen(os.memfd_create("input", os.MFD_CLOEXEC), "w+b")
    file.write(text.encode())
    file.seek(0)
    return file


def _outputs(child: subprocess.Popen[bytes], timeout: float, progress: Progress) -> tuple[bytes, bytes]:
    """Return both outputs of a program. Raises subprocess.TimeoutExpired."""
    deadline = time.monotonic() + timeout
    while True:
        left = deadline - time.monotonic()
        try:
            return child.communicate(timeout=max(0.0, min(PULSE_SECONDS, left)))
        except subprocess.TimeoutExpired:
            if left <= PULSE_SECONDS:
                raise
        progress()


def find_program(name: str) -> str:
    """Return the path of a program on PATH; empty if there is none.

    A PATH without iptables, as a user's may be, is extended by the usual directories of system programs. A PATH with
    iptables is used as it is: programs that it hides are hidden on purpose.
    """
    path = os.environ.get("PATH", os.defpath)
    if shutil.which(_USUAL, path=path) is None:
        path = os.pathsep.join([path, *_SBIN])
    return shutil.which(name, path=path) or ""
