# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Tokens of ServiceAccounts: what they say, and how the API server is asked for one that expires.

A token is a JSON Web Token (RFC 7519). Only the API server can tell whether it is valid; what it says of itself is read
without a check of the signature, to know when to ask for the next one. Tokens of Secrets have no end.
"""

from __future__ import annotations

import base64
import binascii
from typing import Any, Dict, NamedTuple, Protocol

from ...errors import ApiError, ConfigurationError
from ...regular_files import parse_json

#: The API server accepts no shorter lifetime (KEP-1205).
LEAST_SECONDS = 600
_SUBJECT = "system:serviceaccount:"
_MOST_SECONDS = 1 << 40


class Sender(Protocol):
    """The part of ``cluster.api.ApiClient`` that is used here."""

    def post(self, path: str, body: Dict[str, Any], purpose: str) -> Dict[str, Any]:
        """Create an object and return what the server answers. Raises ApiError."""


class ServiceToken(NamedTuple):
    """What a token says of itself.

    ``namespace`` and ``account``: the ServiceAccount's; ``account_uid`` and ``node_uid``: of the objects that it ends
    with; ``node``: the Node to which it is bound, empty if it is not. ``issued`` and ``expires``: seconds since the
    epoch, 0 for a token without end.
    """

    namespace: str
    account: str
    account_uid: str = ""
    node: str = ""
    node_uid: str = ""
    issued: float = 0.0
    expires: float = 0.0

    @property
    def lifetime(self) -> float:
        """Seconds from issue to expiry; 0 without end."""
        return max(0.0, self.expires - self.issued)

    @property
    def renewal(self) -> float:
        """When it should be renewed, at half its life, in seconds since the epoch; only for one that expires."""
        return self.issued + self.lifetime / 2


def parse_token(token: str) -> ServiceToken:
    """Return what a ServiceAccount's token says. Raises ConfigurationError, which never shows the token."""
    try:
        payload = token.split(".")[1]
        claims = parse_json(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
        return _of_claims(claims)
    except (IndexError, ValueError, TypeError, KeyError, AttributeError, OverflowError, binascii.Error) as error:
        raise ConfigurationError("the token is not that of a ServiceAccount") from error


def _of_claims(claims: Dict[str, Any]) -> ServiceToken:
    subject = claims["sub"]
    namespace, _colon, account = subject[len(_SUBJECT) :].partition(":")
    if not subject.startswith(_SUBJECT) or not namespace or not account:
        raise ValueError("sub")
    bound = claims.get("kubernetes.io") or {}
    node, owner = bound.get("node") or {}, bound.get("serviceaccount") or {}
    # A Secret's token has its claims in another form (pkg/serviceaccount/legacy.go).
    uid = owner.get("uid") or claims.get("kubernetes.io/serviceaccount/service-account.uid") or ""
    issued, expires = float(claims.get("iat") or 0), float(claims.get("exp") or 0)
    if not 0 <= issued < _MOST_SECONDS or not 0 <= expires < _MOST_SECONDS:
        raise ValueError("iat, exp")
    texts = (namespace, account, uid, node.get("name") or "", node.get("uid") or "")
    if not all(isinstance(text, str) for text in texts):
        raise TypeError("text")
    return ServiceToken(*texts, issued, expires)


def request_token(
    client: Sender, namespace: str, account: str, seconds: int, node: str = "", node_uid: str = ""
) -> str:
    """Ask the API server for a token of a ServiceAccount that lives ``seconds``, and return it.

    With ``node`` and its uid the token is bound to that Node: it ends with the Node object. The server may give it a
    shorter life. Raises ApiError.
    """
    spec: Dict[str, Any] = {"expirationSeconds": max(LEAST_SECONDS, int(seconds))}
    if node:
        spec["boundObjectRef"] = {"kind": "Node", "apiVersion": "v1", "name": node, "uid": node_uid}
    body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
    purpose = f"create a token for ServiceAccount {namespace}/{account}"
    answer = client.post(f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token", body, purpose)
    status = answer.get("status")
    token = status.get("token") if isinstance(status, dict) else None
    if not isinstance(token, str) or not token:
        raise ApiError(f"{purpose}: the answer holds no token")
    return token
