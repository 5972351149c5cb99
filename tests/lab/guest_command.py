# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""One command in a guest with a kernel of its own: its output is streamed, and its exit status returned."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Callable, ContextManager, Mapping, Optional, Sequence

from tests.lab.node import Specification
from tests.lab.system import LabError

#: Boots a guest that becomes the specified node; gives a function that says whether the guest has ended.
Boot = Callable[[Specification], ContextManager[Callable[[], bool]]]


def run_in_guest(
    boot: Boot,
    argv: Sequence[str],
    *,
    hostname: str,
    environment: Optional[Mapping[str, str]] = None,
    modules: Sequence[str] = (),
    writable: Sequence[str] = (),
    directory: Optional[str] = None,
    timeout: float = 1800,
) -> int:
    """Boot a guest, run one command in it, stream what it prints, and return its exit status.

    Only writes below the ``writable`` directories reach the host. The command gets this process's PATH, HOME and
    LANG and what ``environment`` adds. Raises LabError when the guest does not boot or the time is over.
    """
    scratch = Path(tempfile.mkdtemp(prefix="kubenode-guest-"))
    given = {key: os.environ[key] for key in ("PATH", "HOME", "LANG") if key in os.environ}
    specification = Specification(
        hostname=hostname,
        scratch=str(scratch),
        writable=[str(Path(path).resolve()) for path in writable],
        modules=list(modules),
        environment={"LANG": "C.UTF-8", **given, "PYTHONDONTWRITEBYTECODE": "1", **(environment or {})},
        directory=directory or os.getcwd(),
        command=list(argv),
    )
    try:
        with boot(specification) as ended:
            _stream(ended, scratch, timeout)
        status = scratch / "status"
        if not status.exists():
            raise LabError(f"the guest {hostname} ended without a result:\n{last_words(scratch)}")
        return int(status.read_text(encoding="ascii"))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def last_words(scratch: Path) -> str:
    """Return the end of what a failed guest left behind: its own error report, else its console."""
    for name in ("error", "qemu.log", "console"):
        path = scratch / name
        if path.exists() and path.stat().st_size:
            return path.read_text(encoding="utf-8", errors="replace")[-3000:]
    return "no console output"


def _stream(ended: Callable[[], bool], scratch: Path, timeout: float) -> None:
    output = scratch / "output"
    output.touch()
    deadline = time.monotonic() + timeout
    finished: Optional[float] = None
    with open(output, "rb") as stream:
        while True:
            over = ended()
            text = stream.read()
            if text:
                sys.stdout.write(text.decode("utf-8", "replace"))
                sys.stdout.flush()
            if over or (finished is not None and time.monotonic() > finished + 5):
                return
            if finished is None and (scratch / "status").exists():
                finished = time.monotonic()
            if time.monotonic() > deadline:
                raise LabError(f"the command in the guest did not end within {timeout:.0f} s")
            time.sleep(0.05)
