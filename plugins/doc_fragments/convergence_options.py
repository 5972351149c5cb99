# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Options of all modules that converge a node or predict what a convergence would change."""

from __future__ import annotations


class ModuleDocFragment:
    """Document the lock, the state directory and the size of a diff (``kubenode.proxy.convergence_options``)."""

    DOCUMENTATION = r"""
options:
  lock_timeout:
    description:
      - Seconds to wait for another convergence of the same node to finish. A comparison, such as one in check mode,
        waits for none.
    type: float
    default: 30.0
  state_directory:
    description:
      - Directory for the lock and for data that one convergence leaves for the next. Use the same directory for all
        modules. Its contents should not survive a reboot.
    type: path
    default: /run/kubenode-proxy
  diff_lines:
    description:
      - Maximum number of lines that a diff shows per table and side. The diff states how many more there are. V(0)
        shows all lines.
    type: int
    default: 200
"""
