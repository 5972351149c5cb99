# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The input of the report: the file of results, and the document of an earlier report."""

from __future__ import annotations

import json
import os
from typing import Any, Optional

from ...base.errors import ConfigurationError, errors_as, os_errors


def _read_json(path: str) -> Any:
    with os_errors(ConfigurationError, f"{path}: cannot be read"), open(path, encoding="utf-8") as file:
        text = file.read()
    with errors_as(ConfigurationError, f"{path}: is not JSON", ValueError):
        return json.loads(text)


def read_entries(path: str) -> list[Any]:
    """Return the entries of a file of results: a JSON list. Raises ConfigurationError."""
    entries = _read_json(path)
    if not isinstance(entries, list):
        raise ConfigurationError(f"{path}: must hold a list with one entry per node")
    return entries


def read_previous(path: str, schema: str) -> Optional[dict[str, Any]]:
    """Return the document of an earlier report, None if there is no such file. Raises ConfigurationError."""
    if not os.path.exists(path):
        return None
    found = _read_json(path)
    if not isinstance(found, dict) or found.get("schema") != schema:
        raise ConfigurationError(f"{path}: is not a report with the schema {schema}")
    return found
