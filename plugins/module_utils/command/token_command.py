# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""``token``: show the claims of the node's token for the API server, and replace the token."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from typing import Any

from ..base.errors import ConfigurationError, ProxyError
from ..base.timestamps import timestamp
from ..cluster.api.access.service_token import ServiceToken, parse_token
from ..cluster.api.access.token_file import is_private, read_token, store_token
from ..cluster.api.client import ApiClient
from ..cluster.api.connection import ApiConnection
from ..cluster.api.errors import UNAUTHORIZED
from .result import OK, CommandResult

_MOST_CHARACTERS = 1 << 16
_ANSWER_SECONDS = 5.0


def show_or_store_token(arguments: argparse.Namespace) -> CommandResult:
    """Show the token's claims, never the token; with ``--store`` write the one from standard input first."""
    changed = False
    if arguments.store:
        changed = store_token(arguments.token, sys.stdin.read(_MOST_CHARACTERS).strip())
    try:
        token = parse_token(read_token(arguments.token))
    except FileNotFoundError:
        raise ConfigurationError(f"{arguments.token}: there is no token") from None
    document = {**_document(token), "changed": changed}
    if not is_private(arguments.token) or (arguments.kubeconfig and _is_rejected(arguments.kubeconfig)):
        document["renewalDue"] = True
    end = f"expires at {document['expires']}" if token.expires else "does not expire"
    bound = f"bound to Node {token.node}" if token.node else "bound to no Node"
    return CommandResult(OK, [f"ServiceAccount {token.namespace}/{token.account}, {bound}, {end}"], document)


def _is_rejected(kubeconfig: str) -> bool:
    """Return whether the API server rejects the token, as it does once the Node or its own key was replaced."""
    try:
        with contextlib.closing(ApiClient(ApiConnection(kubeconfig=kubeconfig), _ANSWER_SECONDS)) as client:
            return client.ready() == UNAUTHORIZED
    except ProxyError:
        return False


def _document(token: ServiceToken) -> dict[str, Any]:
    return {
        "account": f"{token.namespace}/{token.account}",
        "accountUid": token.account_uid,
        "node": token.node,
        "nodeUid": token.node_uid,
        "issued": timestamp(token.issued) if token.issued else "",
        "expires": timestamp(token.expires) if token.expires else "",
        "lifetimeSeconds": int(token.lifetime),
        "renewalDue": bool(token.expires) and time.time() >= token.renewal,
    }
