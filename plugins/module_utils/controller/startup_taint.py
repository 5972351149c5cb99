# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A taint with which kubelet registers a Node, so that no pod is scheduled there before the agent serves it."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..base.errors import ConfigurationError
from ..cluster.api.client import ApiClient
from ..cluster.api.resource_types import NODES
from ..cluster.fields import is_label_key
from .patches import get_node, repeat_on_conflict, send_patch


class TaintChange(NamedTuple):
    """The taints of a Node before and after, as in its specification."""

    before: list[dict[str, Any]]
    after: list[dict[str, Any]]


def remove_taint(client: ApiClient, node_name: str, key: str, check: bool = False) -> TaintChange:
    """Remove every taint with the key from a Node; other taints are kept. With ``check`` change nothing.

    Raises ApiError, ConfigurationError, PreflightError.
    """
    if not is_label_key(key):
        raise ConfigurationError(f"key: {key!r} is not the key of a taint")

    def change() -> TaintChange:
        node = get_node(client, node_name, "node_name")
        before = list((node.get("spec") or {}).get("taints") or [])
        after = [taint for taint in before if taint.get("key") != key]
        if not check and after != before:
            # A merge patch replaces the whole list.
            version = node["metadata"]["resourceVersion"]
            patch = {"metadata": {"resourceVersion": version}, "spec": {"taints": after or None}}
            send_patch(client, f"{NODES.path}/{node_name}", patch, f"patch Node {node_name}")
        return TaintChange(before, after)

    return repeat_on_conflict(change)
