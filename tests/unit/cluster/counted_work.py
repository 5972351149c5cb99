# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The work of Python code, counted in a way that does not depend on the machine."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any, Callable


def instructions(work: Callable[[], object]) -> int:
    """Return how many instructions of Python's virtual machine a call executes; work in C counts as one each."""
    count = 0

    def trace(frame: FrameType, event: str, _argument: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count
