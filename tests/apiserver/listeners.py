# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""HTTP servers with a thread for each connection, with TLS or without."""

from __future__ import annotations

import http.server
import socket
import ssl
from typing import Any, Optional

from .tls import Certificates


class PlainServer(http.server.ThreadingHTTPServer):
    """A server over plain HTTP, on an address or on a socket that listens already."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, address: tuple[str, int], handler: type, listener: Optional[socket.socket] = None) -> None:
        super().__init__(address, handler, bind_and_activate=listener is None)
        if listener is not None:
            self.socket.close()
            self.socket = listener
            self.server_address = listener.getsockname()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that close their connection."""


class TlsServer(PlainServer):
    """A server over TLS."""

    def __init__(
        self,
        address: tuple[str, int],
        handler: type,
        certificates: Certificates,
        listener: Optional[socket.socket] = None,
    ) -> None:
        super().__init__(address, handler, listener)
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(certificates.certificate, certificates.key)
        # Request a client certificate without requiring one, as a real server does.
        self._context.load_verify_locations(certificates.authority)
        self._context.verify_mode = ssl.CERT_OPTIONAL

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Shake hands in the connection's own thread, so that a slow client does not block the others."""
        with self._context.wrap_socket(request, server_side=True) as wrapped:
            super().finish_request(wrapped, client_address)
