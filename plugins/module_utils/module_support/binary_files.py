# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Files of bytes that a module writes: whole or not at all, and only if they differ."""

from __future__ import annotations

from ..errors import ConfigurationError
from ..whole_files import write_whole


def replace_file(path: str, content: bytes, *, check: bool) -> bool:
    """Write the file unless it holds the content already; return whether it differs. A new file is for its owner only.

    Raises ConfigurationError if the file or its directory cannot be read or written.
    """
    try:
        if _holds(path, content):
            return False
        if not check:
            write_whole(path, content)
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be written: {error.strerror or error}") from error
    return True


def _holds(path: str, content: bytes) -> bool:
    try:
        with open(path, "rb") as stream:
            return stream.read(len(content) + 1) == content
    except FileNotFoundError:
        return False
