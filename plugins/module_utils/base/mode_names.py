# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The names of the modes, for all layers. Importing them imports nothing else."""

from __future__ import annotations

IPTABLES = "iptables"
IPVS = "ipvs"
NFTABLES = "nftables"
USERSPACE = "userspace"
MODES: tuple[str, ...] = (IPTABLES, IPVS, NFTABLES, USERSPACE)
#: The mode in effect where another program serves the Services; it is not selected by ``mode``.
NONE = "none"
MODES_IN_EFFECT: tuple[str, ...] = (*MODES, NONE)
#: Instead of a mode: the best one that is possible on the node.
AUTO = "auto"
