# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The defaults of options of a convergence, for those who need no more of it."""

from __future__ import annotations

#: How long to wait for another convergence of the node.
DEFAULT_LOCK_SECONDS = 30.0
#: How many saved states of the node to keep.
DEFAULT_KEEP = 5
#: The greatest loss of Services with endpoints that a convergence applies, and that the agent does not report.
DEFAULT_UNSERVED_PERCENT = 50.0
