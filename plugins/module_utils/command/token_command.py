# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""``token``: show the claims of the node's token for the API server, and replace the token."""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any, Dict

from ..base.errors import ConfigurationError
from ..base.timestamps import timestamp
from ..cluster.api.access.service_token import ServiceToken, parse_token
from ..cluster.api.access.token_file import read_token, store_token
from .result import OK, CommandResult

_MOST_CHARACTERS = 1 << 16


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
    end = f"expires at {document['expires']}" if token.expires else "does not expire"
    bound = f"bound to Node {token.node}" if token.node else "bound to no Node"
    return CommandResult(OK, [f"ServiceAccount {token.namespace}/{token.account}, {bound}, {end}"], document)


def _document(token: ServiceToken) -> Dict[str, Any]:
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
