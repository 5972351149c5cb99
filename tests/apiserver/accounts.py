# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""ServiceAccounts, their roles, Secrets and tokens, as a real API server and its controllers handle them.

A Secret's token is a JSON Web Token without times: its claims, and so the token, follow from the ServiceAccount's uid
and the Secret's name (kubernetes pkg/serviceaccount/legacy.go). A requested token has times and an identifier of its
own (pkg/serviceaccount/claims.go), and ends with the objects that it names.
"""

from __future__ import annotations

import base64
import copy
import hashlib
import hmac
import itertools
import json
import re
import time
from typing import Callable, Optional

from .failures import Failure
from .store import Object

Answer = tuple[int, Object]

_KEY = b"the key of the test API server"
_PATH = re.compile(
    r"(?:/api/v1|/apis/rbac[.]authorization[.]k8s[.]io/v1)(?:/namespaces/(?P<namespace>[^/]+))?"
    r"/(?P<kind>serviceaccounts|secrets|roles|rolebindings|clusterroles|clusterrolebindings)(?:/(?P<name>[^/]+)(?P<token>/token)?)?\Z"
)
_SECRET_TYPE = "kubernetes.io/service-account-token"
_DISCOVERY = "/api/v1"
_CORE_RESOURCES = ("nodes", "secrets", "serviceaccounts", "services")
_ACCOUNT_NAME = "kubernetes.io/service-account.name"


def _encoded(value: Object) -> str:
    return base64.urlsafe_b64encode(json.dumps(value, separators=(",", ":")).encode()).decode().rstrip("=")


def sign(claims: Object) -> str:
    """Return a token with these claims; the same claims give the same token."""
    text = f"{_encoded({'alg': 'RS256', 'kid': 'test'})}.{_encoded(claims)}"
    signature = hmac.new(_KEY, text.encode(), hashlib.sha256).digest()
    return f"{text}.{base64.urlsafe_b64encode(signature).decode().rstrip('=')}"


def claims_of(token: str) -> Optional[Object]:
    """Return the claims of a token that this server has signed, None otherwise."""
    payload = token.split(".")[1] if token.count(".") == 2 else ""
    try:
        claims: Object = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
    except ValueError:
        return None
    return claims if sign(claims) == token else None


def failure(code: int, reason: str, message: str) -> Answer:
    """Return the answer to a request that fails."""
    return code, Failure(code, reason, message).body


class Accounts:
    """ServiceAccounts and their objects. ``node_uid`` returns the uid of a named Node, empty if there is none.

    ``binds_nodes``: whether tokens can be bound to Nodes (1.31 and later); ``has_requests``: whether there are
    TokenRequests at all (1.22 and later). ``late``: how many reads of a Secret see it without its token. ``writes``:
    method and path of each change; ``requests``: path and body of each TokenRequest.
    """

    def __init__(self, node_uid: Callable[[str], str], clock: Callable[[], float] = time.time) -> None:
        self.objects: dict[str, Object] = {}
        self.writes: list[str] = []
        self.requests: list[tuple[str, Object]] = []
        self.binds_nodes = True
        self.has_requests = True
        self.late = 0
        self._node_uid = node_uid
        self._clock = clock
        self._numbers = itertools.count(1)

    @staticmethod
    def owns(path: str) -> bool:
        """Report whether a path is of one of these kinds, or the list of the resources of the core API."""
        return path == _DISCOVERY or _PATH.match(path) is not None

    def review(self, token: str) -> str:
        """Return the path of the ServiceAccount that a token identifies now; empty if the token is not valid."""
        claims = claims_of(token)
        if claims is None or claims.get("exp", self._clock() + 1) <= self._clock():
            return ""
        _system, _kind, namespace, name = claims["sub"].split(":")
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{name}"
        account = self.objects.get(path)
        bound = claims.get("kubernetes.io") or {}
        uid = claims.get("kubernetes.io/serviceaccount/service-account.uid") or bound["serviceaccount"]["uid"]
        if account is None or account["metadata"]["uid"] != uid:
            return ""
        secret = claims.get("kubernetes.io/serviceaccount/secret.name")
        if secret and f"/api/v1/namespaces/{namespace}/secrets/{secret}" not in self.objects:
            return ""
        node = bound.get("node")
        return "" if node and self._node_uid(node["name"]) != node["uid"] else path

    def allowed(self, account: str, method: str, path: str) -> bool:
        """Report whether a ServiceAccount, given by its path, may create its own token: a bound Role must permit it.

        Each account may list the API's resources (ClusterRole system:discovery).
        """
        if (method, path) == ("GET", _DISCOVERY):
            return True
        place = _PATH.match(path)
        if place is None or method != "POST" or place["token"] is None or path != f"{account}/token":
            return False
        roles = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{place['namespace']}"
        for binding_path, binding in self.objects.items():
            role = self.objects.get(f"{roles}/roles/{(binding.get('roleRef') or {}).get('name')}")
            if not binding_path.startswith(f"{roles}/rolebindings/") or role is None:
                continue
            subject = {"kind": "ServiceAccount", "name": place["name"], "namespace": place["namespace"]}
            if subject in binding["subjects"] and any(
                "serviceaccounts/token" in rule["resources"]
                and "create" in rule["verbs"]
                and place["name"] in rule.get("resourceNames", [place["name"]])
                for rule in role["rules"]
            ):
                return True
        return False

    def answer(self, method: str, path: str, body: Optional[Object]) -> Answer:
        """Carry out a request of an authorized client, one with dryRun on a copy."""
        path, _mark, query = path.partition("?")
        if query == "dryRun=All":
            kept, writes = copy.deepcopy(self.objects), list(self.writes)
            try:
                return self.answer(method, path, body)
            finally:
                self.objects, self.writes = kept, writes
        if path == _DISCOVERY:
            names = [*_CORE_RESOURCES, *(["serviceaccounts/token"] if self.has_requests else [])]
            return 200, {
                "kind": "APIResourceList",
                "groupVersion": "v1",
                "resources": [{"name": name} for name in names],
            }
        place = _PATH.match(path)
        assert place is not None
        if place["token"]:
            return self._token_request(path[: -len("/token")], body or {})
        if method == "POST":
            assert body is not None
            return self._create(f"{path}/{body['metadata']['name']}", body)
        known = self.objects.get(path)
        if known is None:
            return failure(404, "NotFound", f'{place["kind"]} "{place["name"]}" not found')
        if method == "GET":
            return 200, self._read(path, known)
        self.writes.append(f"{method} {path}")
        if method == "DELETE":
            self._delete(path)
            return 200, known
        assert body is not None
        self.objects[path] = {**body, "metadata": {**body["metadata"], "uid": known["metadata"]["uid"]}}
        return 200, self.objects[path]

    def _create(self, path: str, body: Object) -> Answer:
        if path in self.objects:
            return failure(409, "AlreadyExists", f"{path} already exists")
        uid = f"00000000-0000-4000-8000-{next(self._numbers):012d}"
        self.objects[path] = {**body, "metadata": {**body["metadata"], "uid": uid}}
        self.writes.append(f"POST {path}")
        return 201, self.objects[path]

    def _read(self, path: str, found: Object) -> Object:
        """Return an object; like a controller, give a Secret for a ServiceAccount its token soon after creation."""
        if found.get("type") != _SECRET_TYPE:
            return found
        if self.late:
            self.late -= 1
            return found
        metadata = found["metadata"]
        name, namespace = metadata["annotations"][_ACCOUNT_NAME], metadata["namespace"]
        account = self.objects.get(f"/api/v1/namespaces/{namespace}/serviceaccounts/{name}")
        if account is not None:
            prefix = "kubernetes.io/serviceaccount"
            claims = {
                "iss": prefix,
                f"{prefix}/namespace": namespace,
                f"{prefix}/secret.name": metadata["name"],
                f"{prefix}/service-account.name": name,
                f"{prefix}/service-account.uid": account["metadata"]["uid"],
                "sub": f"system:serviceaccount:{namespace}:{name}",
            }
            found = {**found, "data": {"token": base64.b64encode(sign(claims).encode()).decode()}}
            self.objects[path] = found
        return found

    def _delete(self, path: str) -> None:
        """Remove an object and, as a controller does, the Secrets of a removed ServiceAccount."""
        gone = self.objects.pop(path)
        if "/serviceaccounts/" in path:
            for other, item in list(self.objects.items()):
                metadata = item["metadata"]
                if item.get("type") == _SECRET_TYPE and (
                    (metadata["namespace"], metadata["annotations"][_ACCOUNT_NAME])
                    == (gone["metadata"]["namespace"], gone["metadata"]["name"])
                ):
                    del self.objects[other]

    def _token_request(self, path: str, body: Object) -> Answer:
        account = self.objects.get(path)
        if not self.has_requests:
            return failure(404, "NotFound", "the server could not find the requested resource")
        if account is None:
            return failure(404, "NotFound", f"{path} not found")
        self.requests.append((path, body))
        spec, now = body["spec"], int(self._clock())
        metadata, bound = account["metadata"], spec.get("boundObjectRef")
        own: Object = {
            "namespace": metadata["namespace"],
            "serviceaccount": {"name": metadata["name"], "uid": metadata["uid"]},
        }
        if spec.get("expirationSeconds", 3600) < 600:
            return failure(422, "Invalid", "may not specify a duration less than 10 minutes")
        if bound is not None:
            if bound["kind"] != "Node" or not self.binds_nodes:
                return failure(422, "Invalid", 'spec.boundObjectRef.kind: Unsupported value: "Node"')
            uid = self._node_uid(bound["name"])
            if uid != bound.get("uid", uid) or not uid:
                return failure(409 if uid else 404, "Conflict", f"the UID in the bound object reference is not {uid}")
            own["node"] = {"name": bound["name"], "uid": uid}
        claims = {
            "iat": now,
            "nbf": now,
            "exp": now + spec.get("expirationSeconds", 3600),
            "jti": str(next(self._numbers)),
            "kubernetes.io": own,
            "sub": f"system:serviceaccount:{metadata['namespace']}:{metadata['name']}",
        }
        return 201, {**body, "status": {"token": sign(claims), "expirationTimestamp": "2030-01-02T03:04:05Z"}}
