# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The identity of an engine: the collection's version, and a hash of the engine's source.

Both are the same in a clone, in an installed collection and on a node. The hash covers the names and contents of the
Python files that are shipped in the archive. The archive contains the identity as a file; in a source tree it is
computed. The payload of an Ansible module contains only some of the files, so it has no identity.
"""

from __future__ import annotations

import functools
import hashlib
import os
import pkgutil
import re
from typing import NamedTuple, Optional

from ..base.errors import ConfigurationError, os_errors

# Directories with code for Ansible modules, the controller and the general-purpose modules, which a node does not need.
NOT_SHIPPED = ("module_support", "controller", "generic")
VERSION_FILE = "VERSION"
# The role agent installs the identity next to the archive.
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
        """A short form of both, a semantic version with build metadata: ``1.0.0+658f7d18e1be``. Empty if no engine."""
        return f"{self.version}+{self.engine[:SHOWN_DIGITS]}" if self.engine else ""

    @property
    def record(self) -> str:
        """Version and engine hash in full, as in the file VERSION."""
        return f"{self.version}+{self.engine}"


def parse_record(text: str) -> Optional[Identity]:
    """Parse the text of a file VERSION and return the identity, or None if the text is not valid."""
    found = _RECORD.match(text.strip())
    return Identity(found.group(1), found.group(2)) if found is not None else None


def collection_version(directory: str) -> str:
    """Return the version of the collection whose engine is in a directory; empty if its files do not contain one."""
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
    """Return the identity of the engine in a directory. Raises ConfigurationError if there is none."""
    return Identity(collection_version(directory) or UNKNOWN_VERSION, content_hash(source_files(directory)))


def source_files(directory: str) -> dict[str, bytes]:
    """Return the engine's files as :func:`python_files` does. Raises ConfigurationError if some are missing, too."""
    found = python_files(directory)
    if "command/cli.py" not in found:
        raise ConfigurationError(f"{directory}: does not contain the engine: command/cli.py is missing")
    return found


def python_files(directory: str) -> dict[str, bytes]:
    """Read the engine's Python files below its top package: relative path with forward slashes to content, sorted.

    Raises ConfigurationError if a file cannot be read.
    """
    paths: list[str] = []
    for place, directories, files in os.walk(directory):
        relative = os.path.relpath(place, directory)
        if relative == ".":
            directories[:] = [name for name in directories if name not in NOT_SHIPPED]
        directories[:] = sorted(name for name in directories if name != "__pycache__")
        paths += [os.path.normpath(os.path.join(relative, name)) for name in files if name.endswith(".py")]
    found: dict[str, bytes] = {}
    for path in sorted(paths):
        name = os.path.join(directory, path)
        with os_errors(ConfigurationError, name), open(name, "rb") as file:
            found[path.replace(os.sep, "/")] = file.read()
    return found


def content_hash(files: dict[str, bytes]) -> str:
    """Return the SHA-256, in hexadecimal, of the files' names and contents in the order of their names."""
    digest = hashlib.sha256()
    for path in sorted(files):
        content = files[path]
        digest.update(f"{path}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


@functools.cache
def identity() -> Identity:
    """Return the identity of the running engine; in the payload of an Ansible module its hash is empty.

    The result of the first call, at the start of the agent, is kept, because the file may be replaced later.
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


def installed_identity(path: str = INSTALLED_VERSION) -> Optional[Identity]:
    """Return the identity of the engine that the role agent installed on this host; None if it installed none."""
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return parse_record(file.read(4096))
    except OSError:
        return None
