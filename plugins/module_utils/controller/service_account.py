# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""An account for the agent in the cluster, with the minimal permissions.

It consists of objects with the same name: a ServiceAccount; a ClusterRole and its binding; a Role and its binding,
which let the account request its own next token; and, only if all nodes share one token, a Secret that contains it. The
permissions are those of kube-proxy's ClusterRole ``system:node-proxier`` that this engine uses, and reading an Event.

Recreating a Secret of the same name for the same ServiceAccount (uid) gives the same token, so deleting the Secret does
not revoke the token permanently. Only recreating the ServiceAccount does.
"""

from __future__ import annotations

import base64
import functools
import time
from typing import Any, Callable, Mapping, NamedTuple, Optional

from ..base.errors import ApiError, ConfigurationError, errors_as
from ..cluster.api.access.service_token import request_token
from ..cluster.api.client import ApiClient
from ..cluster.api.errors import ApiStatusError, unless_absent
from ..cluster.api.resource_types import NODES
from ..cluster.fields import is_dns_label

MANAGED_LABEL = "app.kubernetes.io/managed-by"
MANAGED_BY = "kubenode.proxy"
RULES: tuple[dict[str, list[str]], ...] = (
    {"apiGroups": [""], "resources": ["services"], "verbs": ["list", "watch"]},
    {"apiGroups": [""], "resources": ["nodes"], "verbs": ["get", "list", "watch"]},
    {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]},
    {"apiGroups": ["networking.k8s.io"], "resources": ["servicecidrs"], "verbs": ["list", "watch"]},
    {"apiGroups": ["events.k8s.io"], "resources": ["events"], "verbs": ["create", "get"]},
)
#: Besides these, where network policies are enforced.
POLICY_RULES: tuple[dict[str, list[str]], ...] = (
    {"apiGroups": [""], "resources": ["pods", "namespaces"], "verbs": ["list", "watch"]},
    {"apiGroups": ["networking.k8s.io"], "resources": ["networkpolicies"], "verbs": ["list", "watch"]},
    {"apiGroups": ["policy.networking.k8s.io"], "resources": ["clusternetworkpolicies"], "verbs": ["list", "watch"]},
)
_SECRET_TYPE = "kubernetes.io/service-account-token"
_POLL_SECONDS = 0.2
_NOT_FOUND = 404
# Asks the API server whether it would make a change.
_DRY_RUN = "?dryRun=All"
# The answer of an API server that does not know the kind in boundObjectRef, or has that feature disabled.
_NOT_BOUND = (400, 422)

Object = dict[str, Any]


class Account(NamedTuple):
    """The namespace of the namespaced objects, and the name of all objects."""

    namespace: str
    name: str


class Wanted(NamedTuple):
    """A desired object: its collection's path, and its content."""

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


class AccountChange(NamedTuple):
    """Descriptions of the changes that were, or would be, made, and their result.

    ``token``: the shared one, None if it does not exist yet or is not requested. ``uid``: the ServiceAccount's, empty
    if it does not exist yet.
    """

    changes: tuple[str, ...]
    token: Optional[str] = None
    uid: str = ""
    warnings: tuple[str, ...] = ()


def wanted_objects(account: Account, shared: bool = True, policies: bool = False) -> list[Wanted]:
    """Return the objects in the order in which they are created; with ``shared``, the Secret is the last one.

    ``policies``: with the rights to read the objects that network policies depend on.

    Raises ConfigurationError for names that are not valid.
    """
    for field, value in account._asdict().items():
        # The API server requires that of namespaces; its rule for ClusterRoles is less strict.
        if not is_dns_label(value):
            raise ConfigurationError(f"{field}: {value!r} is not a DNS label of lower case letters, digits and dashes")
    namespace, name = account
    core = f"/api/v1/namespaces/{namespace}"
    roles, group = "/apis/rbac.authorization.k8s.io/v1", "rbac.authorization.k8s.io"
    subject = {"kind": "ServiceAccount", "name": name, "namespace": namespace}
    own_token: dict[str, list[str]] = {"apiGroups": [""], "resources": ["serviceaccounts/token"], "verbs": ["create"]}
    own_token["resourceNames"] = [name]
    service_account = {**_head("v1", "ServiceAccount", name, namespace), "automountServiceAccountToken": False}
    objects = [Wanted(f"{core}/serviceaccounts", service_account)]
    for kind, place, where, rules in (
        ("ClusterRole", roles, "", [*RULES, *(POLICY_RULES if policies else ())]),
        ("Role", f"{roles}/namespaces/{namespace}", namespace, [own_token]),
    ):
        role = {**_head(f"{group}/v1", kind, name, where), "rules": rules}
        binding = _head(f"{group}/v1", f"{kind}Binding", name, where)
        binding.update(roleRef={"apiGroup": group, "kind": kind, "name": name}, subjects=[subject])
        objects.append(Wanted(f"{place}/{kind.lower()}s", role))
        objects.append(Wanted(f"{place}/{kind.lower()}bindings", binding))
    annotations = {"kubernetes.io/service-account.name": name}
    secret = {**_head("v1", "Secret", name, namespace, annotations), "type": _SECRET_TYPE}
    return [*objects, Wanted(f"{core}/secrets", secret)] if shared else objects


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
    """Return the existing object with the wanted fields; keep the fields of other programs."""
    merged = dict(existing)
    for key, value in wanted.items():
        both = key in ("metadata", "labels", "annotations") and isinstance(existing.get(key), dict)
        merged[key] = _merged(existing[key], value) if both else value
    return merged


def ensure(
    client: ApiClient,
    account: Account,
    *,
    shared: bool = False,
    policies: bool = False,
    check: bool = False,
    timeout: float = 15.0,
    sleep: Callable[[float], None] = time.sleep,
) -> AccountChange:
    """Create or correct the objects; with ``shared`` also the Secret, and return its token.

    ``policies``: see :func:`wanted_objects`.

    Raises ApiError, ConfigurationError.
    """
    changes: list[str] = []
    for item in wanted_objects(account, shared, policies):
        changes += _make(client, item, check)
    uid = _uid(_read(client, wanted_objects(account)[0]))
    if shared:
        token = _token(client, account, timeout, sleep, wait=not check)
        secret = wanted_objects(account)[-1]
        warning = f"{secret}: its token is the same for all nodes and never expires"
        return AccountChange(tuple(changes), token, uid, (warning,))
    return AccountChange(tuple(changes), None, uid, _left_secret(client, account))


def _make(client: ApiClient, item: Wanted, check: bool) -> list[str]:
    """Create or correct one object and return descriptions of the changes. Raises ApiError, ConfigurationError."""
    existing = _read(client, item)
    # With check the API server says whether it would permit the change, but not for a binding: it needs its role.
    sends, query = not check or "roleRef" not in item.content, _DRY_RUN if check else ""
    if existing is None:
        if sends:
            client.send("POST", item.collection + query, item.content, f"create {item}")
        return [f"{item} created"]
    merged = _merged(existing, item.content)
    if merged == existing:
        return []
    for fixed in ("roleRef", "type"):
        if fixed in item.content and existing.get(fixed) != item.content[fixed]:
            raise ConfigurationError(f"{item}: {fixed}: differs and cannot be changed: delete the object")
    if sends:
        client.send("PUT", item.path + query, merged, f"update {item}")
    return [f"{item} corrected"]


def _uid(item: Optional[Object]) -> str:
    return str(((item or {}).get("metadata") or {}).get("uid") or "")


def _left_secret(client: ApiClient, account: Account) -> tuple[str, ...]:
    """Return a warning if there is still a Secret with a shared token, which other nodes may use."""
    secret = wanted_objects(account)[-1]
    if _read(client, secret) is None:
        return ()
    return (f"{secret}: its token never expires and is still valid: rotate the access once each node has its own",)


def rotate(client: ApiClient, account: Account, *, check: bool = False) -> tuple[str, ...]:
    """Delete the ServiceAccount and the Secret, which revokes every token, and return descriptions of the deletions.

    :func:`ensure` can then create a new ServiceAccount. Raises ApiError; ConfigurationError if they are not ours.
    """
    objects = wanted_objects(account)
    changes: list[str] = []
    for item in (objects[-1], objects[0]):
        existing = _read(client, item)
        if existing is None:
            continue
        if not _is_ours(existing):
            raise ConfigurationError(f"{item}: lacks the label {MANAGED_LABEL}={MANAGED_BY}, so it is not deleted")
        changes.append(_delete(client, item, check))
    return tuple(changes)


def _delete(client: ApiClient, item: Wanted, check: bool) -> str:
    client.send("DELETE", item.path + (_DRY_RUN if check else ""), None, f"delete {item}")
    return f"{item} deleted"


class NodeToken(NamedTuple):
    """A token for one node; ``warnings`` say in which respect it is not as requested."""

    token: str
    warnings: tuple[str, ...] = ()


def node_token(client: ApiClient, account: Account, node: str, seconds: int) -> NodeToken:
    """Return a token of the account with a lifetime of ``seconds``, bound to the Node of that name.

    API servers before 1.31 cannot bind a token to a Node (KEP-4193), so the token is not bound. For API servers without
    TokenRequest (KEP-1205, before 1.22) it is the token of the account's Secret, which is created if it is missing.

    Raises ApiError, also if there is no such account; ConfigurationError.
    """
    try:
        return _requested_token(client, account, node, seconds)
    except ApiStatusError as error:
        if error.code != _NOT_FOUND:
            raise
        # The answer is the same if the account is absent, which must not get a token that never expires.
        service_account, *_roles, secret = wanted_objects(account)
        if _read(client, service_account) is None or _has_token_requests(client):
            raise
    _make(client, secret, check=False)
    text = "the API server has no TokenRequest, so the token is the Secret's: the same for all nodes; it never expires"
    return NodeToken(_token(client, account, wait=True) or "", (text,))


def _requested_token(client: ApiClient, account: Account, node: str, seconds: int) -> NodeToken:
    """Request a token that is bound to the Node if that exists and the API server can. Raises ApiError."""
    read_node = functools.partial(client.get, NODES, node)
    found = unless_absent(read_node)
    warning = f"Node {node}: there is no such Node, so the token is not bound to one"
    if found is not None:
        try:
            return NodeToken(request_token(client, *account, seconds=seconds, node=node, node_uid=_uid(found)))
        except ApiStatusError as error:
            if error.code in _NOT_BOUND:
                warning = f"Node {node}: the API server cannot bind a token to a Node: {error}"
            elif error.code != _NOT_FOUND or unless_absent(read_node) is not None:
                raise
    return NodeToken(request_token(client, *account, seconds=seconds), (warning,))


def _has_token_requests(client: ApiClient) -> bool:
    """Report whether the API server lists TokenRequest among its resources. Raises ApiError."""
    answer = client.send("GET", "/api/v1", None, "list the resources of API version v1")
    return any(resource.get("name") == "serviceaccounts/token" for resource in answer.get("resources") or ())


def _token(
    client: ApiClient,
    account: Account,
    timeout: float = 15.0,
    sleep: Callable[[float], None] = time.sleep,
    *,
    wait: bool,
) -> Optional[str]:
    """Return the token that the cluster's controller writes into the Secret soon after its creation."""
    secret = wanted_objects(account)[-1]
    waited = 0.0
    while True:
        found = (_read(client, secret) or {}).get("data") or {}
        if found.get("token"):
            with errors_as(ApiError, f"{secret}: data.token: is not valid", ValueError):
                return base64.b64decode(found["token"], validate=True).decode("ascii")
        if not wait:
            return None
        if waited >= timeout:
            raise ApiError(f"{secret}: data.token: the cluster has not written a token within {timeout:g} s")
        sleep(_POLL_SECONDS)
        waited += _POLL_SECONDS


def _is_ours(existing: Optional[Object]) -> bool:
    labels = ((existing or {}).get("metadata") or {}).get("labels") or {}
    return bool(labels.get(MANAGED_LABEL) == MANAGED_BY)


def remove(client: ApiClient, account: Account, *, check: bool = False) -> AccountChange:
    """Delete the objects that have the label of this collection. Raises ApiError."""
    objects = reversed(wanted_objects(account))
    return AccountChange(tuple(_delete(client, item, check) for item in objects if _is_ours(_read(client, item))))
