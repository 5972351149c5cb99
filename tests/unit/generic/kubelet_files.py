# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""kubelet's kubeconfig in a directory, and API servers that present certificates."""

from __future__ import annotations

import base64
import contextlib
import socket
import ssl
import threading
from pathlib import Path
from typing import Optional

from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.api.access.certificate import Place
from ansible_collections.kubenode.proxy.plugins.module_utils.generic.kubelet import KubeconfigChange, point_to, restore
from tests.apiserver.tls import Certificates

ADDRESS = "127.0.0.9"
NAMES = (ADDRESS, "127.0.0.1")


class TlsServer:
    """A server that accepts TLS connections at a loopback address and closes them."""

    def __init__(self, address: str, certificates: Certificates, port: int = 0) -> None:
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(certificates.certificate, certificates.key)
        self._socket = socket.create_server((address, port))
        self.place = Place(*self._socket.getsockname())
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _peer = self._socket.accept()
            except OSError:
                return
            with contextlib.suppress(OSError), self._context.wrap_socket(connection, server_side=True) as sock:
                sock.recv(1)

    def close(self) -> None:
        # Closing alone does not wake a thread in accept().
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


class Files:
    """A kubeconfig, its record, and a store, as the module has them."""

    def __init__(
        self, directory: Path, authority: Path, server: str = "https://192.0.2.11:6443", more: str = ""
    ) -> None:
        self.path = directory / "kubelet.conf"
        self.record = directory / "state" / "kubelet.json"
        self.backup = directory / "kubelet.conf.before-kubenode-proxy"
        data = base64.b64encode(authority.read_bytes()).decode()
        self.text = f"""apiVersion: v1
kind: Config
clusters:
- name: other
  cluster: {{server: "https://203.0.113.1"}}
- cluster:
    certificate-authority-data: {data}
    # the server
    server: {server}   # as kubeadm has written it
{more}  name: here
contexts:
- {{name: node@here, context: {{cluster: here, user: node}}}}
current-context: node@here
users:
- {{name: node, user: {{token: secret}}}}
"""
        self.path.write_text(self.text)
        self.path.chmod(0o600)
        self.stored: list[str] = []

    def store(self, path: str, content: bytes) -> None:
        self.stored.append(path)
        Path(path).write_bytes(content)

    def point(self, servers: list[TlsServer], *, check: bool = False, seconds: float = 1.0) -> KubeconfigChange:
        places = [server.place for server in servers]
        return point_to(
            str(self.path),
            places[-1],
            places[:-1],
            seconds=seconds,
            check=check,
            store=self.store,
            record=str(self.record),
        )

    def restore(self, *, check: bool = False) -> Optional[KubeconfigChange]:
        return restore(check=check, store=self.store, record=str(self.record))


def everything_below(directory: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file()}
