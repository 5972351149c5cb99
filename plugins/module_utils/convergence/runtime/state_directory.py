# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The directory of the lock and the ledger. It belongs to root; the agent's user may only write to a subdirectory.

Root opens nothing in a directory of another user, because the owner of a directory controls what its names refer to.
"""

from __future__ import annotations

import os

from ...base.installed import STATE_DIRECTORY
from ...base.regular_files import others_write

#: The subdirectory that belongs to the agent's user, with the control socket.
AGENT_DIRECTORY = "agent"
CONTROL_SOCKET = "agent.sock"
#: The file of the ledger, and the limit of its size: 100,000 Services with names of the maximum length.
LEDGER = "ledger.json"
LEDGER_BYTES = 64 << 20
#: The directory of the change that waits to be confirmed; it exists only while one does.
PENDING = "/run/kubenode-proxy-confirm"


def control_socket(directory: str = STATE_DIRECTORY) -> str:
    """Return the path of the agent's control socket below a state directory."""
    return os.path.join(directory, AGENT_DIRECTORY, CONTROL_SOCKET)


DEFAULT_CONTROL = control_socket()
#: Files of the agent, in its own directory; the one above it belongs to root.
DEFAULT_CACHE = "/var/lib/kubenode-proxy/agent/cluster.json.gz"
DEFAULT_TOKEN = "/var/lib/kubenode-proxy/agent/token"


def prepare_state_directory(directory: str) -> None:
    """Create the directory if it is missing; as root, refuse one that another user can write. Raises OSError."""
    os.makedirs(directory, mode=0o755, exist_ok=True)
    distrusted = "" if os.geteuid() else others_write(os.lstat(directory))
    if distrusted:
        reason = f"its directory {distrusted}; root trusts only directories that no other user can write"
        raise PermissionError(1, reason, directory)
