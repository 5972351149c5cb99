# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Options of all modules that change a node as a convergence does, or tell what one would change."""

from __future__ import annotations


class ModuleDocFragment:
    """``kubenode.proxy.convergence_options``: the lock, and how much a diff shows."""

    DOCUMENTATION = r"""
options:
  lock_timeout:
    description:
      - Seconds to wait for another convergence of the same node, and for the lock of iptables.
    type: float
    default: 30.0
  state_directory:
    description:
      - Directory for the lock and for what must be remembered from one convergence to the next, the same for all
        modules. It should not outlive a reboot.
    type: path
    default: /run/kubenode-proxy
  diff_lines:
    description:
      - Up to how many lines per table a diff shows of each side; it says how many are left out. V(0) shows all.
    type: int
    default: 200
"""
