# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which engine this is: a hash of its source, the same in a clone, in an installed collection and on a node.

The hash covers the Python files that are shipped in the archive, by name and content. The archive carries it as a file;
a source tree computes it. The payload of an Ansible module holds only some of the files, and has no identity.
"""

from __future__ import annotations

import functools
import hashlib
import os
import pkgutil
from typing import Dict, List, Optional

from ..errors import ConfigurationError

# Directories that a node does not need: code of Ansible modules, of the controller, and of the general-purpose modules.
NOT_SHIPPED = ("module_support", "controller", "generic")
VERSION_FILE = "VERSION"
# Where the role agent installs the archive, and beside it the hash.
INSTALLED_VERSION = "/usr/local/lib/kubenode-proxy/VERSION"


def source_files(directory: str) -> Dict[str, bytes]:
    """The engine's Python files below its top package: relative path with forward slashes to content, sorted.

    Raises ConfigurationError if the directory does not hold the engine or a file cannot be read.
    """
    paths: List[str] = []
    for place, directories, files in os.walk(directory):
        relative = os.path.relpath(place, directory)
        if relative == ".":
            directories[:] = [name for name in directories if name not in NOT_SHIPPED]
        directories[:] = sorted(name for name in directories if name != "__pycache__")
        paths += [os.path.normpath(os.path.join(relative, name)) for name in files if name.endswith(".py")]
    found: Dict[str, bytes] = {}
    for path in sorted(paths):
        try:
            with open(os.path.join(directory, path), "rb") as file:
                found[path.replace(os.sep, "/")] = file.read()
        except OSError as error:
            raise ConfigurationError(f"{os.path.join(directory, path)}: {error.strerror}") from error
    if "command/cli.py" not in found:
        raise ConfigurationError(f"{directory}: does not hold the engine: command/cli.py is missing")
    return found


def content_hash(files: Dict[str, bytes]) -> str:
    """SHA-256, in hexadecimal, of the files' names and contents in the order of their names."""
    digest = hashlib.sha256()
    for path in sorted(files):
        content = files[path]
        digest.update(f"{path}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


@functools.cache
def engine_hash() -> str:
    """The hash of the engine that is running; empty in the payload of an Ansible module, which is a part of it.

    Remembered from the first call, at the start of the agent: later the file may be that of another engine.
    """
    top = __name__.rsplit(".", 2)[0]
    try:
        recorded = pkgutil.get_data(top, VERSION_FILE)
    except OSError:
        recorded = None
    if recorded:
        return recorded.decode("ascii", "replace").strip()
    directory = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    try:
        return content_hash(source_files(directory))
    except ConfigurationError:
        return ""


def installed_hash(path: str = INSTALLED_VERSION) -> Optional[str]:
    """The hash of the engine that the role agent has installed on this host; None if it has not."""
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read().strip() or None
    except OSError:
        return None
