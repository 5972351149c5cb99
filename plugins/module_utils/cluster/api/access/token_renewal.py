# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Renewal of the node's own token for the API server at half its lifetime.

The role agent writes the first token, and the kubeconfig refers to its file. If the token cannot be renewed before it
expires, the programmed rules are kept, and the next run of the role writes a new token to the file.
"""

from __future__ import annotations

import time
from typing import Callable

from ....base.errors import ConfigurationError, ProxyError, errors_as
from ....base.log import Log
from ....base.timestamps import timestamp
from .abortable import AbortableClient, Connect, Expect
from .service_token import ServiceToken, parse_token, request_token
from .token_file import read_token, store_token

#: Seconds between checks of the file: the role may have written another token.
CHECK_SECONDS = 300.0
#: Seconds after a failure, and between two renewals if this node's clock is wrong.
PAUSE_SECONDS = 60.0


class TokenRenewal:
    """Renews the token in the file at ``path``; does nothing while there is no file, or if its token never expires.

    ``connect`` creates a client that uses the token. ``clock``: seconds since the epoch. ``monotonic``: seconds, which
    only count how long a token is known: a node's clock may be behind that of the API server.
    """

    def __init__(
        self,
        path: str,
        connect: Connect,
        log: Log,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = path
        self._client = AbortableClient(connect)
        self._log = log
        self._clock = clock
        self._monotonic = monotonic
        self._expires = 0.0
        self._known_since = 0.0
        # A renewed token that could not be written to the file: the next step does not request another one.
        self._unwritten = ""
        self._last_logged = ""

    def interrupt(self) -> None:
        """Abort a request that hangs; called from another thread."""
        self._client.interrupt()

    def step(self, expect: Expect = lambda _seconds: None) -> float:
        """Renew the token if it is due; return the seconds until the next step. A failure is logged."""
        try:
            return self._step(expect)
        except ProxyError as error:
            # Log each error once, until another one occurs or the token is renewed.
            if str(error) != self._last_logged:
                self._last_logged = str(error)
                self._log.warning("the token for the API server cannot be renewed", error=error)
        return PAUSE_SECONDS

    def _step(self, expect: Expect) -> float:
        try:
            text = read_token(self._path)
        except FileNotFoundError:
            return CHECK_SECONDS
        with errors_as(ConfigurationError, self._path, ConfigurationError):
            token = parse_token(text)
        if not token.expires:
            return CHECK_SECONDS
        if token.expires != self._expires:
            self._expires, self._known_since = token.expires, self._monotonic()
        known = self._monotonic() - self._known_since
        left = min(token.renewal - self._clock(), token.lifetime / 2 - known)
        if left > 0:
            self._last_logged = ""
            return min(left, CHECK_SECONDS)
        self._renew(token, expect)
        self._last_logged = ""
        return PAUSE_SECONDS

    def _renew(self, token: ServiceToken, expect: Expect) -> None:
        """Request a new token and store it. Raises ProxyError."""
        try:
            text, self._unwritten = self._unwritten or self._request(token, expect), ""
            renewed = parse_token(text)
            if renewed.expires <= token.expires:
                raise ConfigurationError("the API server does not issue a token with a later expiry")
            self._unwritten = text
            store_token(self._path, text)
            self._unwritten = ""
        except ProxyError as error:
            if self._clock() < token.expires:
                end = f"it expires at {timestamp(token.expires)}"
            else:
                end = f"it has expired at {timestamp(token.expires)}: run the role agent again"
            raise ConfigurationError(f"{error} ({end}; the programmed rules are kept)") from error
        self._log.info("the token for the API server was renewed", until=timestamp(renewed.expires))

    def _request(self, token: ServiceToken, expect: Expect) -> str:
        """Request a token with the same account, lifetime and binding. Raises ApiError."""
        with self._client.opened(expect) as client:
            seconds = int(token.lifetime)
            try:
                return request_token(
                    client, token.namespace, token.account, seconds=seconds, node=token.node, node_uid=token.node_uid
                )
            except ProxyError as error:
                # The next step asks another server, if this one fails and there are several.
                client.report(error)
                raise
