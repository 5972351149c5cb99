# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A place for accounts: the few requests by which the role makes one, answered over TLS from memory."""

from __future__ import annotations

import base64
import http.server
import json
import ssl
import threading
from typing import Any, Dict, List

from tests.apiserver.tls import Certificates


class Accounts:
    """Stores what is posted; a Secret for a ServiceAccount has the token as soon as it is there."""

    def __init__(self, certificates: Certificates, token: str) -> None:
        self.objects: Dict[str, Dict[str, Any]] = {}
        self.writes: List[str] = []
        self.token = token
        handler = type("Handler", (_Handler,), {"accounts": self})
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificates.certificate, certificates.key)
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        threading.Thread(target=self._server.serve_forever, args=(0.1,), daemon=True).start()

    @property
    def url(self) -> str:
        """https:// address of the server."""
        return f"https://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()


class _Handler(http.server.BaseHTTPRequestHandler):
    accounts: Accounts

    def log_message(self, format: str, *args: object) -> None:
        """Writes are recorded in Accounts.writes."""

    def _answer(self, code: int, body: Dict[str, Any]) -> None:
        text = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def _body(self) -> Dict[str, Any]:
        content: Dict[str, Any] = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        return content

    def do_GET(self) -> None:
        """One object, or 404."""
        found = self.accounts.objects.get(self.path)
        missing = {"kind": "Status", "code": 404, "reason": "NotFound", "message": "not found"}
        self._answer(200 if found else 404, found or missing)

    def do_POST(self) -> None:
        """Store an object."""
        content = self._body()
        if content["kind"] == "Secret":
            content["data"] = {"token": base64.b64encode(self.accounts.token.encode()).decode()}
        path = f"{self.path}/{content['metadata']['name']}"
        self.accounts.writes.append(f"POST {path}")
        self.accounts.objects[path] = content
        self._answer(201, content)

    def do_DELETE(self) -> None:
        """Forget an object."""
        self.accounts.writes.append(f"DELETE {self.path}")
        self._answer(200, self.accounts.objects.pop(self.path))
