# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""An account for the agent at the API server, with the rights that it needs and no others.

Four objects of one name: a ServiceAccount, a Secret with its token, a ClusterRole and the binding of the two. The
rights are those of kube-proxy's ClusterRole ``system:node-proxier`` without what this engine never does.
"""

from __future__ import annotations

import base64
import re
import time
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Tuple

from ..cluster.api import ApiClient, unless_absent
from ..errors import ApiError, ConfigurationError

MANAGED_LABEL = "app.kubernetes.io/managed-by"
MANAGED_BY = "kubenode.proxy"
RULES: Tuple[Dict[str, List[str]], ...] = (
    {"apiGroups": [""], "resources": ["services"], "verbs": ["list", "watch"]},
    {"apiGroups": [""], "resources": ["nodes"], "verbs": ["get", "list", "watch"]},
    {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]},
    {"apiGroups": ["networking.k8s.io"], "resources": ["servicecidrs"], "verbs": ["list", "watch"]},
    {"apiGroups": ["events.k8s.io"], "resources": ["events"], "verbs": ["create"]},
)
# RFC 1123, as the API server demands it of namespaces; stricter than it is for ClusterRoles.
_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?\Z")
_SECRET_TYPE = "kubernetes.io/service-account-token"
_POLL_SECONDS = 0.2

Object = Dict[str, Any]


class Account(NamedTuple):
    """Where the objects are: namespace of ServiceAccount and Secret, and the name of all four."""

    namespace: str
    name: str


class Wanted(NamedTuple):
    """An object that shall be there: its collection's path, and its content."""

    collection: str
    content: Object

    @property
    def path(self) -> str:
        """Path of the object itself."""
        return f"{self.collection}/{self.content['metadata']['name']}"

    def __str__(self) -> str:
        metadata = self.content["metadata"]
        where = f"{metadata['namespace']}/" if "namespace" in metadata else ""
        return f"{self.content['kind']} {where}{metadata['name']}"


class Outcome(NamedTuple):
    """What was, or would be, changed, in words; and the token, None where there is none yet."""

    changes: Tuple[str, ...]
    token: Optional[str] = None


def wanted_objects(account: Account) -> List[Wanted]:
    """The four objects, in the order in which they are made. Raises ConfigurationError for names that are not valid."""
    for field, value in account._asdict().items():
        if not _NAME.match(value):
            raise ConfigurationError(f"{field}: {value!r} is not a DNS label of lower case letters, digits and dashes")
    namespace, name = account
    core = f"/api/v1/namespaces/{namespace}"
    roles = "/apis/rbac.authorization.k8s.io/v1"
    group = "rbac.authorization.k8s.io"
    subject = {"kind": "ServiceAccount", "name": name, "namespace": namespace}
    annotations = {"kubernetes.io/service-account.name": name}
    return [
        Wanted(
            f"{core}/serviceaccounts",
            {**_head("v1", "ServiceAccount", name, namespace), "automountServiceAccountToken": False},
        ),
        Wanted(f"{roles}/clusterroles", {**_head(f"{group}/v1", "ClusterRole", name), "rules": list(RULES)}),
        Wanted(
            f"{roles}/clusterrolebindings",
            {
                **_head(f"{group}/v1", "ClusterRoleBinding", name),
                "roleRef": {"apiGroup": group, "kind": "ClusterRole", "name": name},
                "subjects": [subject],
            },
        ),
        Wanted(f"{core}/secrets", {**_head("v1", "Secret", name, namespace, annotations), "type": _SECRET_TYPE}),
    ]


def _head(
    version: str, kind: str, name: str, namespace: str = "", annotations: Optional[Mapping[str, str]] = None
) -> Object:
    metadata: Object = {"name": name, "labels": {MANAGED_LABEL: MANAGED_BY}}
    if namespace:
        metadata["namespace"] = namespace
    if annotations:
        metadata["annotations"] = dict(annotations)
    return {"apiVersion": version, "kind": kind, "metadata": metadata}


def _read(client: ApiClient, item: Wanted) -> Optional[Object]:
    return unless_absent(lambda: client.send("GET", item.path, None, f"get {item}"))


def _merged(existing: Object, wanted: Object) -> Object:
    """The existing object with the wanted fields; what others have put beside them stays."""
    merged = dict(existing)
    for key, value in wanted.items():
        both = key in ("metadata", "labels", "annotations") and isinstance(existing.get(key), dict)
        merged[key] = _merged(existing[key], value) if both else value
    return merged


def ensure(
    client: ApiClient,
    account: Account,
    *,
    check: bool = False,
    timeout: float = 15.0,
    sleep: Callable[[float], None] = time.sleep,
) -> Outcome:
    """Make or correct the four objects and return the token. Raises ApiError, ConfigurationError."""
    changes: List[str] = []
    for item in wanted_objects(account):
        existing = _read(client, item)
        if existing is None:
            changes.append(f"{item} created")
            if not check:
                client.send("POST", item.collection, item.content, f"create {item}")
            continue
        merged = _merged(existing, item.content)
        if merged == existing:
            continue
        for fixed in ("roleRef", "type"):
            if fixed in item.content and existing.get(fixed) != item.content[fixed]:
                raise ConfigurationError(
                    f"{item}: {fixed}: is another and cannot be changed: delete the object"
                )
        changes.append(f"{item} corrected")
        if not check:
            client.send("PUT", item.path, merged, f"update {item}")
    return Outcome(tuple(changes), _token(client, account, timeout, sleep, wait=not check))


def _token(
    client: ApiClient, account: Account, timeout: float, sleep: Callable[[float], None], *, wait: bool
) -> Optional[str]:
    """The token that the cluster's controller writes into the Secret, soon after it was made."""
    secret = wanted_objects(account)[-1]
    waited = 0.0
    while True:
        found = (_read(client, secret) or {}).get("data") or {}
        if found.get("token"):
            try:
                return base64.b64decode(found["token"], validate=True).decode("ascii")
            except ValueError as error:
                raise ApiError(f"{secret}: data.token: is not valid: {error}") from error
        if not wait:
            return None
        if waited >= timeout:
            raise ApiError(f"{secret}: data.token: the cluster has not written a token within {timeout:g} s")
        sleep(_POLL_SECONDS)
        waited += _POLL_SECONDS


def remove(client: ApiClient, account: Account, *, check: bool = False) -> Outcome:
    """Delete those of the four objects that carry the label of this collection. Raises ApiError."""
    changes: List[str] = []
    for item in reversed(wanted_objects(account)):
        existing = _read(client, item)
        labels = ((existing or {}).get("metadata") or {}).get("labels") or {}
        if labels.get(MANAGED_LABEL) != MANAGED_BY:
            continue
        changes.append(f"{item} deleted")
        if not check:
            client.send("DELETE", item.path, None, f"delete {item}")
    return Outcome(tuple(changes))
