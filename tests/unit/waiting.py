# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Waits for what another thread does."""

from __future__ import annotations

import time
from typing import Callable

#: Seconds, of which an idle machine needs a small part.
PATIENCE = 30.0


def wait_for(condition: Callable[[], object], seconds: float = PATIENCE) -> None:
    """Wait until a condition holds. Raises AssertionError on a timeout."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not in time: {condition}"
        time.sleep(0.005)
