# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a reboot invalidates in a cluster state that was kept: the addresses of the pods that ran on the node."""

from __future__ import annotations

import contextlib
import json
from typing import Any, Collection, Iterable, Iterator

from ...base.regular_files import parse_json


def without_local_pods(objects: Iterable[dict[str, Any]], node: str, own: Collection[str]) -> Iterator[dict[str, Any]]:
    """Yield the objects without the pods of this node, whose addresses are others after a reboot.

    ``own``: the addresses of the node, which are those of its pods with the host's network.
    """
    for item in objects:
        with contextlib.suppress(AttributeError, TypeError, KeyError):
            # Of an object that is not as it should be, the parser says so.
            if item["kind"] == "EndpointSlice" and item.get("endpoints"):
                item["endpoints"] = [each for each in item["endpoints"] if not _is_local_pod(each, node, own)]
            elif item["kind"] == "Pod" and item["spec"].get("nodeName") == node and not item["spec"].get("hostNetwork"):
                continue
        yield item


def _is_local_pod(endpoint: dict[str, Any], node: str, own: Collection[str]) -> bool:
    return endpoint.get("nodeName") == node and not set(endpoint.get("addresses") or ()).issubset(own)


def texts_without_local_pods(texts: Iterable[bytes], node: str, own: Collection[str]) -> Iterator[bytes]:
    """Do the same with objects as JSON; only those that name the node are decoded. Raises ValueError."""
    name = json.dumps(node).encode()
    for text in texts:
        if name in text:
            for item in without_local_pods([parse_json(text)], node, own):
                yield json.dumps(item, separators=(",", ":")).encode()
        else:
            yield text
