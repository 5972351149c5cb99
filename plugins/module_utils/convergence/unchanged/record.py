# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The record that a complete run leaves for the next one, in the state directory, which only root can write to.

The file holds the SHA-256 of the rest on its first line, so that a damaged file is not a record. A run without a valid
record is a complete run.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from typing import Any, NamedTuple, Optional

from ...base.regular_files import parse_json, read_trusted
from ...base.whole_files import write_whole

FILE = "unchanged.json"
_VERSION = 1
_MOST_BYTES = 4 << 20

State = dict[str, Any]
"""What is compared, by name, as JSON values."""


class Record(NamedTuple):
    """A complete run: its input and the state that it left, its result and its warnings.

    ``given``: see :mod:`.inputs`; ``directory``: of the static Services; ``state``: see :mod:`.surroundings`.
    ``taken``: when the run ended, in seconds since the boot.
    """

    given: State
    directory: str
    state: State
    taken: float
    result: dict[str, Any]
    warnings: list[str]


def record_path(directory: str) -> str:
    """Return the path of the record in a state directory."""
    return os.path.join(directory, FILE)


def read_record(directory: str) -> Optional[Record]:
    """Return the record, None if there is none, if it is damaged, or if another user than root may have written it."""
    try:
        return _parsed(read_trusted(record_path(directory), _MOST_BYTES))
    except (OSError, ValueError, TypeError):
        return None


_TYPES = {"given": dict, "directory": str, "state": dict, "taken": float, "result": dict, "warnings": list}


def _parsed(content: bytes) -> Optional[Record]:
    """Return the record in a file's content, None if it is not one. Raises ValueError, TypeError."""
    digest, _newline, text = content.partition(b"\n")
    if digest != _digest(text):
        return None
    document = parse_json(text)
    if not isinstance(document, dict) or document.pop("version", None) != _VERSION:
        return None
    record = Record(**document)
    usable = all(isinstance(getattr(record, name), kind) for name, kind in _TYPES.items())
    return record if usable else None


def _digest(text: bytes) -> bytes:
    return hashlib.sha256(text).hexdigest().encode()


def write_record(directory: str, record: Record) -> bool:
    """Replace the record; return whether it could be written."""
    text = json.dumps({"version": _VERSION, **record._asdict()}, sort_keys=True).encode()
    if len(text) > _MOST_BYTES // 2:
        return False
    try:
        write_whole(record_path(directory), _digest(text) + b"\n" + text)
    except OSError:
        return False
    return True


def forget_record(directory: str) -> None:
    """Remove the record, and temporary files of killed writers, if this user may."""
    with contextlib.suppress(OSError):
        for name in os.listdir(directory):
            if name == FILE or name.startswith(f".{FILE}."):
                with contextlib.suppress(OSError):
                    os.unlink(os.path.join(directory, name))
