# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which engine this is: the collection's version, and a hash of the engine's source.

Both are the same in a clone, in an installed collection and on a node. The hash covers the Python files that are
shipped in the archive, by name and content. The archive carries both as a file; a source tree works them out. The
payload of an Ansible module holds only some of the files, and has no identity.
"""

from __future__ import annotations

import functools
import hashlib
import os
import pkgutil
import re
from typing import Dict, List, NamedTuple, Optional

from ..errors import ConfigurationError

# Directories that a node does not need: code of Ansible modules, of the controller, and of the general-purpose modules.
NOT_SHIPPED = ("module_support", "controller", "generic")
VERSION_FILE = "VERSION"
# Where the role agent installs the archive, and beside it the identity.
INSTALLED_VERSION = "/usr/local/lib/kubenode-proxy/VERSION"
UNKNOWN_VERSION = "0.0.0"
SHOWN_DIGITS = 12

_RECORD = re.compile(r"([0-9A-Za-z.-]+)\+([0-9a-f]+)\Z")
# An installed collection has MANIFEST.json, a clone galaxy.yml.
_COLLECTION_FILES = (
    ("MANIFEST.json", re.compile(r'"version":\s*"([0-9A-Za-z.+-]+)"')),
    ("galaxy.yml", re.compile(r"(?m)^version:\s*[\"']?([0-9A-Za-z.+-]+)")),
)


class Identity(NamedTuple):
    """``version``: of the collection, such as ``0.1.0``. ``engine``: SHA-256 of the engine's source, in hexadecimal."""

    version: str
    engine: str

    @property
    def text(self) -> str:
        """Both in short, as a semantic version with build metadata: ``0.1.0+658f7d18e1be``; empty without an engine."""
        return f"{self.version}+{self.engine[:SHOWN_DIGITS]}" if self.engine else ""

    @property
    def record(self) -> str:
        """Both in full, as the file VERSION holds them."""
        return f"{self.version}+{self.engine}"


def parse_record(text: str) -> Optional[Identity]:
    """Return the identity that the text of a file VERSION gives, or None if it gives none."""
    found = _RECORD.match(text.strip())
    return Identity(found.group(1), found.group(2)) if found is not None else None


def collection_version(directory: str) -> str:
    """Return the version of the collection whose engine is in a directory; empty if its files do not give one."""
    top = os.path.join(directory, os.pardir, os.pardir)
    for name, pattern in _COLLECTION_FILES:
        try:
            with open(os.path.join(top, name), encoding="utf-8") as file:
                found = pattern.search(file.read())
        except (OSError, UnicodeDecodeError):
            continue
        if found is not None:
            return found.group(1)
    return ""


def source_identity(directory: str) -> Identity:
    """Return the identity of the engine in a directory. Raises ConfigurationError if it holds none."""
    return Identity(collection_version(directory) or UNKNOWN_VERSION, content_hash(source_files(directory)))


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
def identity() -> Identity:
    """Return the identity of the engine that is running; in the payload of an Ansible module its hash is empty.

    Remembered from the first call, at the start of the agent: later the file may be that of another engine.
    """
    top = __name__.rsplit(".", 2)[0]
    try:
        recorded = pkgutil.get_data(top, VERSION_FILE)
    except OSError:
        recorded = None
    if recorded:
        found = parse_record(recorded.decode("ascii", "replace"))
        if found is not None:
            return found
    directory = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    try:
        return source_identity(directory)
    except ConfigurationError:
        return Identity(UNKNOWN_VERSION, "")


def engine_hash() -> str:
    """Return the hash of the engine that is running; empty in the payload of an Ansible module, a part of it."""
    return identity().engine


def installed_identity(path: str = INSTALLED_VERSION) -> Optional[Identity]:
    """Return the identity of the engine that the role agent has installed on this host; None if it has not."""
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return parse_record(file.read(4096))
    except OSError:
        return None
