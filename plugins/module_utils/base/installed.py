# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Files that roles and playbooks write on a node, and that its programs read."""

from __future__ import annotations

#: The configuration of the agent.
CONFIGURATION_FILE = "/etc/kubenode-proxy/config.yaml"
#: The directory of the state that a node boots with, and the state that counts.
BOOT_DIRECTORY = "/var/lib/kubenode-proxy-boot"
BOOT_STATE = f"{BOOT_DIRECTORY}/state.json.gz"
#: Exists while ``migrate`` keeps kube-proxy off the node.
KEPT_OFF_FILE = "/var/lib/kubenode-proxy/kube-proxy-kept-off"
#: The default directory of saved states.
HISTORY_DIRECTORY = "/var/lib/kubenode-proxy-history"
#: The directory of the lock and the ledger.
STATE_DIRECTORY = "/run/kubenode-proxy"
