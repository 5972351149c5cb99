# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The file that a task writes for the next boot. It is replaced as a whole, so two purposes need two files."""

from __future__ import annotations

from typing import Any, Mapping

from ..errors import ConfigurationError


def own_file(parameters: Mapping[str, Any], purpose: str, default: str, needed: bool) -> str:
    """Return the path of the file that a task owns, or empty text if it needs none.

    ``purpose``: the option that marks a task for the service proxy, whose file is ``default``. Raises
    ConfigurationError if neither this option nor a file is given, because the task would replace the service proxy's
    file.
    """
    if not needed:
        return ""
    chosen = parameters["persistent_file"]
    if chosen:
        return str(chosen)
    if parameters[purpose]:
        return default
    raise ConfigurationError(
        f"persistent_file: must be given without {purpose}, since {default} belongs to the service proxy as a whole;"
        " or set persistent: false"
    )
