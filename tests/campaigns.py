# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Number of examples of the property tests: few in ``make test``, ten times as many in ``make test-full``.

FEW_EXAMPLES reduces them to a fifth for repeated runs of the same tests on the oldest and the newest Python.
"""

from __future__ import annotations

import os

_FACTOR = (10 if os.environ.get("FULL") else 1) / (5 if os.environ.get("FEW_EXAMPLES") else 1)


def examples(count: int) -> int:
    """Return the number of examples to try where ``make test`` tries ``count``."""
    return max(1, int(count * _FACTOR))
