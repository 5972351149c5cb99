# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What differs between a snapshot file and the objects about to be written to it, by name, for a diff."""

from __future__ import annotations

import os
from typing import Any, Dict, Iterable, List, Tuple

from ..cluster.snapshot import canonical_snapshot, parse_snapshot, read_snapshot, snapshot_digest
from ..errors import SnapshotError


def _lines(objects: Iterable[Any]) -> Dict[str, str]:
    """Per object (``Service shop/cart``) a short digest of the fields of it that a snapshot holds."""
    content, _counts = canonical_snapshot(objects)
    lines = {}
    for item in parse_snapshot(content):
        metadata = item.get("metadata") if isinstance(item, dict) else None
        metadata = metadata if isinstance(metadata, dict) else {}
        name = "/".join(str(metadata[key]) for key in ("namespace", "name") if metadata.get(key))
        kind = str(item.get("kind")) if isinstance(item, dict) else "object"
        lines[f"{kind} {name}"] = snapshot_digest(repr(item).encode("utf-8", "replace"))[:12]
    return lines


def snapshot_difference(path: str, objects: Iterable[Any]) -> Tuple[List[str], List[str]]:
    """Lines naming the objects in which the file and ``objects`` differ: as they are in the file, and as they will be.

    A file that is no snapshot and is about to be replaced counts as empty.
    """
    before: Dict[str, str] = {}
    if os.path.exists(path):
        try:
            before = _lines(read_snapshot(path))
        except SnapshotError:
            before = {}
    after = _lines(objects)
    differing = sorted(label for label in {**before, **after} if before.get(label) != after.get(label))
    return (
        [f"{label} {before[label]}" for label in differing if label in before],
        [f"{label} {after[label]}" for label in differing if label in after],
    )
