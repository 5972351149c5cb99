# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The content of a snapshot file: the cluster's objects without what changes all the time and nobody here reads.

A node's heartbeat and the bookkeeping of the API server would make every snapshot differ from the last one. With them
left out, and everything in a fixed order, equal cluster states give equal bytes.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import zlib
from typing import Any, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple

_METADATA = ("name", "namespace", "labels", "deletionTimestamp")
_ANNOTATIONS = (
    "endpoints.kubernetes.io/last-change-trigger-time",
    "service.kubernetes.io/topology-aware-hints",
    "service.kubernetes.io/topology-mode",
)
# Kind -> parts of the object that are kept besides apiVersion, kind and metadata; () stands for the whole part.
_PARTS: Dict[str, Dict[str, Tuple[str, ...]]] = {
    "Service": {"spec": (), "status": ("loadBalancer",)},
    "EndpointSlice": {"addressType": (), "endpoints": (), "ports": ()},
    "Node": {"spec": ("podCIDR", "podCIDRs", "taints"), "status": ("addresses",)},
    "ServiceCIDR": {"spec": ("cidrs",)},
}
_API_VERSIONS = {
    "Service": "v1",
    "EndpointSlice": "discovery.k8s.io/v1",
    "Node": "v1",
    "ServiceCIDR": "networking.k8s.io/v1",
}


def essential(kind: str, item: Mapping[str, Any]) -> Dict[str, Any]:
    """One object of the kind, as the API server lists it, reduced to what a service proxy reads.

    Parts that are malformed are kept as they are: judging them is the business of whoever reads the snapshot.
    """
    kept: Dict[str, Any] = {"apiVersion": item.get("apiVersion") or _API_VERSIONS[kind], "kind": kind}
    metadata = item.get("metadata")
    if isinstance(metadata, Mapping):
        kept["metadata"] = {key: metadata[key] for key in _METADATA if key in metadata}
        annotations = metadata.get("annotations")
        if isinstance(annotations, Mapping):
            known = {key: annotations[key] for key in _ANNOTATIONS if key in annotations}
            if known:
                kept["metadata"]["annotations"] = known
    for part, fields in _PARTS[kind].items():
        value = item.get(part)
        if value is None:
            continue
        if fields and isinstance(value, Mapping):
            value = {key: value[key] for key in fields if key in value}
        kept[part] = value
    return kept


def identity(item: Mapping[str, Any]) -> Tuple[str, str, str]:
    """Kind, namespace and name of an object, empty where it does not say."""
    metadata = item.get("metadata")
    metadata = metadata if isinstance(metadata, Mapping) else {}
    return str(item.get("kind") or ""), str(metadata.get("namespace") or ""), str(metadata.get("name") or "")


def snapshot_document(items: Iterable[Mapping[str, Any]]) -> bytes:
    """A ``List`` of the objects as JSON in a fixed order: equal objects give equal bytes."""
    ordered = sorted(items, key=identity)
    document = {"apiVersion": "v1", "kind": "List", "items": ordered}
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode("utf-8")


def digest(content: bytes) -> str:
    """SHA-256 of the uncompressed content, as hexadecimal text."""
    return hashlib.sha256(content).hexdigest()


def compress(content: bytes) -> bytes:
    """gzip without a time stamp: equal content gives equal bytes."""
    buffer = io.BytesIO()
    with gzip.GzipFile(filename="", mode="wb", fileobj=buffer, compresslevel=6, mtime=0) as stream:
        stream.write(content)
    return buffer.getvalue()


def existing_items(content: Optional[bytes]) -> List[Mapping[str, Any]]:
    """The objects of a file that :func:`compress` or :func:`snapshot_document` made; none if it is anything else.

    Only a diff is made of them, so that a file of another making, about to be replaced, is no error.
    """
    if content is None:
        return []
    try:
        text = gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content
        document = json.loads(text)
    except (OSError, EOFError, zlib.error, ValueError):
        return []
    items = document.get("items") if isinstance(document, dict) else None
    return [item for item in items if isinstance(item, dict)] if isinstance(items, list) else []


def object_lines(items: Iterable[Mapping[str, Any]]) -> Dict[str, str]:
    """For a diff: per object (``Service shop/cart``) a short digest of its content."""
    lines = {}
    for item in items:
        kind, namespace, name = identity(item)
        label = f"{kind} {namespace}/{name}" if namespace else f"{kind} {name}"
        lines[label] = digest(json.dumps(item, sort_keys=True).encode())[:12]
    return lines


def object_differences(
    before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]
) -> Tuple[List[str], List[str]]:
    """Lines naming the objects that differ: those of the old content and those of the new."""
    old, new = object_lines(before), object_lines(after)
    differing = sorted(label for label in {**old, **new} if old.get(label) != new.get(label))
    return (
        [f"{label} sha256:{old[label]}" for label in differing if label in old],
        [f"{label} sha256:{new[label]}" for label in differing if label in new],
    )
