# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The line about a drain that several commands print."""

from __future__ import annotations

from typing import Any, Mapping

from ...base.timestamps import timestamp


def drain_line(answer: Mapping[str, Any]) -> str:
    """Return an agent's drain in one line. Raises LookupError, TypeError or ValueError if the answer is not valid."""
    if not answer["drained"]:
        return f"not drained; ignored: {answer['problem']}" if answer["problem"] else "not drained"
    since, until = (timestamp(float(answer[name])) for name in ("since", "until"))
    return f"drained since {since} until {until} ({float(answer['remainingSeconds']):.0f} s left)"
