# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The node's own token for the API server, renewed at half its life by whoever uses it.

The role agent writes the first one, and the kubeconfig refers to the file. A token that cannot be renewed in time
expires: the dataplane stays as it is, and the next run of the role writes another one, which is read from the file.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Callable, Optional

from ...cluster.access.service_token import ServiceToken, parse_token, request_token
from ...cluster.access.token_file import read_token, store_token
from ...cluster.api import ApiClient
from ...errors import ConfigurationError, ProxyError
from ...timestamps import timestamp
from ..supervision import Task
from ..surface.log import Log

#: Makes a client; what it is given learns how long each request may take.
Connect = Callable[[Callable[[float], None]], ApiClient]
#: How long after a look at the file the next one follows, in seconds: the role may have written another token.
LOOK_SECONDS = 300.0
#: After a failure, and between two renewals where this node's clock is wrong.
PAUSE_SECONDS = 60.0


class TokenKeeper:
    """Renews the token in the file at ``path``; does nothing while there is no such file, or its token has no end.

    ``connect`` makes a client that uses the token, and tells the function that it is given how many seconds each
    request may take. ``clock``: seconds since the epoch.
    """

    def __init__(self, path: str, connect: Connect, log: Log, clock: Callable[[], float] = time.time) -> None:
        self._path = path
        self._connect = connect
        self._log = log
        self._clock = clock
        self._stop = threading.Event()
        self._client: Optional[ApiClient] = None
        self._said = ""

    def run(self, task: Task) -> None:
        """Renew until :meth:`stop`; the body of a supervised thread."""
        while not self._stop.is_set():
            task.busy(LOOK_SECONDS)
            pause = self.step(task.busy)
            task.idle()
            self._stop.wait(pause)

    def stop(self) -> None:
        """End the thread soon; a request that is under way is not waited for."""
        self._stop.set()

    def interrupt(self) -> None:
        """Break off a request that hangs; called from another thread."""
        client = self._client
        if client is not None:
            client.interrupt()

    def step(self, expect: Callable[[float], None] = lambda _seconds: None) -> float:
        """Renew the token if it is due; return the seconds until the next step. A failure is logged."""
        try:
            return self._step(expect)
        except ProxyError as error:
            # Once, until it is another one or is over.
            if str(error) != self._said:
                self._said = str(error)
                self._log.warning("the token for the API server is not renewed", error=error)
        return PAUSE_SECONDS

    def _step(self, expect: Callable[[float], None]) -> float:
        try:
            token = parse_token(read_token(self._path))
        except FileNotFoundError:
            return LOOK_SECONDS
        if not token.expires:
            return LOOK_SECONDS
        left = token.renewal - self._clock()
        if left > 0:
            self._said = ""
            return min(left, LOOK_SECONDS)
        self._renew(token, expect)
        self._said = ""
        return PAUSE_SECONDS

    def _renew(self, token: ServiceToken, expect: Callable[[float], None]) -> None:
        """Raises ProxyError."""
        try:
            text = self._request(token, expect)
            renewed = parse_token(text)
            if renewed.expires <= token.expires:
                raise ConfigurationError("the API server gives none that lives longer")
            store_token(self._path, text)
        except ProxyError as error:
            if self._clock() < token.expires:
                end = f"it expires at {timestamp(token.expires)}"
            else:
                end = f"it has expired at {timestamp(token.expires)}: run the role agent again"
            raise ConfigurationError(f"{error} ({end}; what is programmed stays)") from error
        self._log.info("the token for the API server is renewed", until=timestamp(renewed.expires))

    def _request(self, token: ServiceToken, expect: Callable[[float], None]) -> str:
        """Ask for a token like this one. Raises ApiError."""
        with contextlib.closing(self._connect(expect)) as client:
            self._client = client
            try:
                seconds = int(token.lifetime)
                return request_token(client, token.namespace, token.account, seconds, token.node, token.node_uid)
            finally:
                self._client = None
