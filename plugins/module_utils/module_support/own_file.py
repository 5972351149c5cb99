# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The file that a task writes for the next boot. It is replaced as a whole, so two purposes need two files."""

from __future__ import annotations

import os
from typing import Any, Mapping

from ..base.errors import ConfigurationError
from ..kernel.modules.boot_directories import unread_name


def boot_file(option: str, path: str) -> str:
    """Return the path of a file that is to be read at boot, as the user gave it by ``option``.

    Raises ConfigurationError for a path that depends on the directory in which the task runs, and for a name that no
    program reads.
    """
    if not os.path.isabs(path):
        raise ConfigurationError(f"{option}: {path} is not an absolute path")
    reason = unread_name(path)
    if reason:
        raise ConfigurationError(f"{option}: {path} would not be read at boot: {reason}")
    return path


def own_file(parameters: Mapping[str, Any], purpose: str, default: str, needed: bool) -> str:
    """Return the path of the file that a task owns, or empty text if it needs none.

    ``purpose``: the option that marks a task for the service proxy, whose file is ``default``. Raises
    ConfigurationError if neither this option nor a file is given, because the task would replace the service proxy's
    file, and for a file that cannot be read at boot.
    """
    if not needed:
        return ""
    chosen = parameters["persistent_file"]
    if chosen:
        return boot_file("persistent_file", str(chosen))
    if parameters[purpose]:
        return default
    raise ConfigurationError(
        f"persistent_file: name a file of the task's own, such as {os.path.dirname(default)}/60-web.conf, or set"
        f" persistent: false; {default} is only for a task with {purpose}, since it belongs to the service proxy"
    )


def unread_warnings(*files: tuple[str, str, str]) -> list[str]:
    """Return a warning for each file that a task writes although no program reads it at boot.

    ``files``: option, path, empty if the task writes none, and why it is not read, empty if it is.
    """
    return [f"{option}: {path} is not read at boot: {reason}" for option, path, reason in files if path and reason]
