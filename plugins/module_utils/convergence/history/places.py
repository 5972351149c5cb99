# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Where saved states and the pending change are, for those who need no more than that."""

from __future__ import annotations

DEFAULT_DIRECTORY = "/var/lib/kubenode-proxy-history"
DEFAULT_KEEP = 5
#: The directory of the change that waits to be confirmed; it exists only while one does.
PENDING = "/run/kubenode-proxy-confirm"
