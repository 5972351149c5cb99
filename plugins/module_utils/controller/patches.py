# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Changes of objects that others change as well, by merge patches (RFC 7386).

A patch with the resourceVersion on which it is based fails with an error 409 if another client has changed the object
meanwhile. The patch is then computed again.
"""

from __future__ import annotations

import urllib.parse
from typing import Any, Callable, TypeVar

from ..base.errors import PreflightError
from ..cluster.api.client import ApiClient
from ..cluster.api.errors import ApiStatusError, unless_absent
from ..cluster.api.resource_types import NODES

_MERGE_PATCH = "application/merge-patch+json"
_FIELD_MANAGER = "kubenode.proxy"
_ATTEMPTS = 5
_CONFLICT = 409

Object = dict[str, Any]
Result = TypeVar("Result")


def send_patch(client: ApiClient, path: str, patch: Object, purpose: str) -> None:
    """Apply a merge patch to the object at a path. Raises ApiError, whose text begins with ``purpose``."""
    target = f"{path}?{urllib.parse.urlencode({'fieldManager': _FIELD_MANAGER})}"
    client.send("PATCH", target, patch, purpose, _MERGE_PATCH)


def repeat_on_conflict(change: Callable[[], Result]) -> Result:
    """Return the result of a change, which reads the object and patches it, and is repeated a few times at a conflict.

    Raises ApiStatusError if another client has changed the object during each attempt.
    """
    for _attempt in range(_ATTEMPTS - 1):
        try:
            return change()
        except ApiStatusError as error:
            if error.code != _CONFLICT:
                raise
    return change()


def get_node(client: ApiClient, name: str, field: str) -> Object:
    """Return the Node of this name, which the option ``field`` has. Raises PreflightError if there is none."""
    node = unless_absent(lambda: client.get(NODES, name))
    if node is None:
        raise PreflightError(f"{field}: no Node is named {name}")
    return node
