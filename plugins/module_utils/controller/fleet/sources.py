# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The input of the report: the file of results."""

from __future__ import annotations

import json
from typing import Any, List

from ...errors import ConfigurationError


def read_entries(path: str) -> List[Any]:
    """Return the entries of a file of results: a JSON list. Raises ConfigurationError."""
    try:
        with open(path, encoding="utf-8") as file:
            entries = json.load(file)
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise ConfigurationError(f"{path}: is not JSON: {error}") from error
    if not isinstance(entries, list):
        raise ConfigurationError(f"{path}: must hold a list with one entry per node")
    return entries
