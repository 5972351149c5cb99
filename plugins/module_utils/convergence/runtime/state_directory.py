# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The directory of the lock and the ledger. It belongs to root; the agent's user may only write to a subdirectory.

Earlier versions gave the whole directory to the agent's user. Root changes the owner of such a directory before opening
anything in it, because the owner of a directory controls what its names refer to.
"""

from __future__ import annotations

import os
import shutil
import stat
from typing import Set

from ...base.regular_files import others_write

DEFAULT_DIRECTORY = "/run/kubenode-proxy"
#: The subdirectory that belongs to the agent's user, with the control socket.
AGENT_DIRECTORY = "agent"
CONTROL_SOCKET = "agent.sock"
#: The file of the ledger, and the limit of its size: 100,000 Services with names of the maximum length.
LEDGER = "ledger.json"
LEDGER_BYTES = 64 << 20
#: The directory of the change that waits to be confirmed; it exists only while one does.
PENDING = "/run/kubenode-proxy-confirm"
#: Files that a running agent of an earlier version needs: its socket, and the lock that it holds.
_LOCK = "lock"


def control_socket(directory: str = DEFAULT_DIRECTORY) -> str:
    """Return the path of the agent's control socket below a state directory."""
    return os.path.join(directory, AGENT_DIRECTORY, CONTROL_SOCKET)


DEFAULT_CONTROL = control_socket()
#: Files of the agent, in its own directory; the one above it belongs to root.
DEFAULT_CACHE = "/var/lib/kubenode-proxy/agent/cluster.json.gz"
DEFAULT_TOKEN = "/var/lib/kubenode-proxy/agent/token"


def prepare_state_directory(directory: str) -> None:
    """Create the directory if it is missing; as root, ensure that only root can write to it.

    Another user's directory at the default path, left by an earlier version, is given to root; at any other path it is
    refused. Raises OSError.
    """
    os.makedirs(directory, mode=0o755, exist_ok=True)
    if os.geteuid() != 0:
        return
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(descriptor)
        distrusted = others_write(found)
        if not distrusted:
            return
        if directory != DEFAULT_DIRECTORY:
            reason = f"its directory {distrusted}; root trusts only directories that no other user can write"
            raise PermissionError(1, reason, directory)
        os.fchown(descriptor, 0, 0)
        os.fchmod(descriptor, 0o755)
        _remove_untrusted(directory, descriptor, {0, found.st_uid})
    finally:
        os.close(descriptor)


def _remove_untrusted(directory: str, descriptor: int, owners: Set[int]) -> None:
    """Keep the lock if it is one, the control socket and the agent's own directory; remove everything else.

    From now on only root can change the names. A running agent of an earlier version holds the lock, so its file is
    kept, with root as its owner; its group keeps access.
    """
    for name in os.listdir(descriptor):
        found = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
        if name == AGENT_DIRECTORY and stat.S_ISDIR(found.st_mode) and found.st_uid in owners:
            continue
        if name == CONTROL_SOCKET and stat.S_ISSOCK(found.st_mode):
            continue
        if name == _LOCK and stat.S_ISREG(found.st_mode) and found.st_nlink == 1 and found.st_uid in owners:
            lock = os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=descriptor)
            os.fchown(lock, 0, -1)
            os.fchmod(lock, 0o660)
            os.close(lock)
        elif stat.S_ISDIR(found.st_mode):
            shutil.rmtree(os.path.join(directory, name))
        else:
            os.unlink(name, dir_fd=descriptor)
