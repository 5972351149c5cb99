# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Tokens of ServiceAccounts: reading their claims, and requesting tokens that expire from the API server.

A token is a JSON Web Token (RFC 7519). Only the API server can verify it; its claims are read here without a check of
the signature, to find out when to request the next one. Tokens from Secrets do not expire.
"""

from __future__ import annotations

import base64
import binascii
from typing import Any, NamedTuple, Protocol

from ....base.errors import ApiError, ConfigurationError
from ....base.regular_files import parse_json

#: The API server accepts no shorter lifetime (KEP-1205).
LEAST_SECONDS = 600
_SUBJECT = "system:serviceaccount:"
_MOST_SECONDS = 1 << 40


class Sender(Protocol):
    """The part of ``cluster.api.ApiClient`` that :func:`request_token` uses."""

    def post(self, path: str, body: dict[str, Any], purpose: str) -> dict[str, Any]:
        """Create an object and return the server's answer. Raises ApiError."""


class ServiceToken(NamedTuple):
    """The claims of a token.

    ``namespace`` and ``account``: of the ServiceAccount; ``node``: the Node to which the token is bound, empty if it is
    bound to none. ``account_uid`` and ``node_uid``: of these objects; the token becomes invalid when one is deleted.
    ``issued`` and ``expires``: seconds since the epoch, 0 for a token that does not expire.
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
        """Seconds from issue to expiry; 0 for a token that does not expire."""
        return max(0.0, self.expires - self.issued)

    @property
    def renewal(self) -> float:
        """When to renew a token that expires: at half its lifetime, in seconds since the epoch."""
        return self.issued + self.lifetime / 2


def parse_token(token: str) -> ServiceToken:
    """Return the claims of a ServiceAccount's token. Raises ConfigurationError, which never shows the token."""
    try:
        payload = token.split(".")[1]
        claims = parse_json(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
        return _of_claims(claims)
    except (IndexError, ValueError, TypeError, KeyError, AttributeError, OverflowError, binascii.Error) as error:
        raise ConfigurationError("the token is not a ServiceAccount token") from error


def _of_claims(claims: dict[str, Any]) -> ServiceToken:
    subject = claims["sub"]
    namespace, _colon, account = subject[len(_SUBJECT) :].partition(":")
    if not subject.startswith(_SUBJECT) or not namespace or not account:
        raise ValueError("sub")
    bound = claims.get("kubernetes.io") or {}
    node, owner = bound.get("node") or {}, bound.get("serviceaccount") or {}
    # A token from a Secret has other claims (pkg/serviceaccount/legacy.go).
    uid = owner.get("uid") or claims.get("kubernetes.io/serviceaccount/service-account.uid") or ""
    issued, expires = float(claims.get("iat") or 0), float(claims.get("exp") or 0)
    if not 0 <= issued < _MOST_SECONDS or not 0 <= expires < _MOST_SECONDS:
        raise ValueError("iat, exp")
    texts = (namespace, account, uid, node.get("name") or "", node.get("uid") or "")
    if not all(isinstance(text, str) for text in texts):
        raise TypeError("text")
    return ServiceToken(*texts, issued, expires)


def request_token(
    client: Sender, namespace: str, account: str, *, seconds: int, node: str = "", node_uid: str = ""
) -> str:
    """Request a token of a ServiceAccount that is valid for ``seconds``, and return it.

    With ``node`` and its uid the token is bound to that Node: it becomes invalid when the Node is deleted. The server
    may shorten the lifetime. Raises ApiError.
    """
    spec: dict[str, Any] = {"expirationSeconds": max(LEAST_SECONDS, int(seconds))}
    if node:
        spec["boundObjectRef"] = {"kind": "Node", "apiVersion": "v1", "name": node, "uid": node_uid}
    body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
    purpose = f"create a token for ServiceAccount {namespace}/{account}"
    answer = client.post(f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token", body, purpose)
    status = answer.get("status")
    token = status.get("token") if isinstance(status, dict) else None
    if not isinstance(token, str) or not token:
        raise ApiError(f"{purpose}: the answer contains no token")
    return token
