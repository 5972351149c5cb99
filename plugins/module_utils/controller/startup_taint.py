# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A taint with which kubelet registers a Node, so that no pod is scheduled there before the agent serves it.

The change is a merge patch (RFC 7386), which replaces the whole list of taints. So it contains the resourceVersion on
which it is based: a concurrent change by another client causes an error 409, and the patch is computed again.
"""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple

from ..base.errors import ConfigurationError
from ..cluster.api.client import ApiClient
from ..cluster.api.errors import ApiStatusError, unless_absent
from ..cluster.api.resource_types import NODES
from ..cluster.fields import is_label_key
from .placement import MERGE_PATCH

_ATTEMPTS = 5
_CONFLICT = 409


class TaintChange(NamedTuple):
    """The taints of a Node before and after, as in its specification."""

    before: List[Dict[str, Any]]
    after: List[Dict[str, Any]]


def remove_taint(client: ApiClient, node_name: str, key: str, check: bool = False) -> TaintChange:
    """Remove every taint with the key from a Node; other taints are kept. With ``check`` change nothing.

    Raises ApiError, ConfigurationError.
    """
    if not is_label_key(key):
        raise ConfigurationError(f"key: {key!r} is not the key of a taint")
    attempts = 0
    while True:
        attempts += 1
        node = unless_absent(lambda: client.get(NODES, node_name))
        if node is None:
            raise ConfigurationError(f"node_name: no Node is named {node_name}")
        before = list((node.get("spec") or {}).get("taints") or [])
        after = [taint for taint in before if taint.get("key") != key]
        if check or after == before:
            return TaintChange(before, after)
        version = node["metadata"]["resourceVersion"]
        patch = {"metadata": {"resourceVersion": version}, "spec": {"taints": after or None}}
        try:
            client.send("PATCH", f"{NODES.path}/{node_name}", patch, f"patch Node {node_name}", MERGE_PATCH)
            return TaintChange(before, after)
        except ApiStatusError as error:
            if error.code != _CONFLICT or attempts == _ATTEMPTS:
                raise
