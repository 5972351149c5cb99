# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A client of the API server whose request another thread can abort."""

from __future__ import annotations

import contextlib
from typing import Callable, Iterator, Optional

from ..client import ApiClient

#: Called before each request with the seconds that it may take.
Expect = Callable[[float], None]
#: Creates a client that announces its requests. Raises ConfigurationError or ApiError.
Connect = Callable[[Expect], ApiClient]


class AbortableClient:
    """The client of one thread, made for each use; another thread can abort the request in progress."""

    def __init__(self, connect: Connect) -> None:
        self._connect = connect
        self._client: Optional[ApiClient] = None

    @contextlib.contextmanager
    def opened(self, expect: Expect) -> Iterator[ApiClient]:
        """Yield a new client and close it afterwards. Raises ConfigurationError or ApiError."""
        with contextlib.closing(self._connect(expect)) as client:
            self._client = client
            try:
                yield client
            finally:
                self._client = None

    def interrupt(self) -> None:
        """Abort a request that hangs; called from another thread."""
        client = self._client
        if client is not None:
            client.interrupt()
