# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Atomic replacement of the binary files that modules write."""

from __future__ import annotations

import contextlib

from ..base.errors import ConfigurationError, os_errors
from ..base.whole_files import write_whole


def replace_file(path: str, content: bytes, *, check: bool) -> bool:
    """Replace a file unless it already has the content; return whether it differs. Only the owner can read a new file.

    Raises ConfigurationError if the file or its directory cannot be read or written.
    """
    with os_errors(ConfigurationError, f"{path}: cannot be written"):
        with contextlib.suppress(FileNotFoundError), open(path, "rb") as stream:
            if stream.read(len(content) + 1) == content:
                return False
        if not check:
            write_whole(path, content)
    return True
