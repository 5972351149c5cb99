# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A certificate authority, a server certificate and a kubeconfig for the test API server, created by openssl."""

from __future__ import annotations

import base64
import json
import os
import subprocess
from pathlib import Path
from typing import NamedTuple, Sequence


class Certificates(NamedTuple):
    """Files in PEM form."""

    authority: Path
    certificate: Path
    key: Path


def _openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)


_CURVE = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


def make_certificates(directory: Path, addresses: Sequence[str] = ("127.0.0.1",)) -> Certificates:
    """Create an authority and a server certificate for localhost and the addresses, valid for ten days."""
    directory.mkdir(parents=True, exist_ok=True)
    authority, authority_key = directory / "ca.crt", directory / "ca.key"
    _openssl(
        *("req", "-x509", *_CURVE, "-days", "10", "-subj", "/CN=test-authority"),
        *("-addext", "keyUsage=critical,keyCertSign,cRLSign"),
        *("-keyout", str(authority_key), "-out", str(authority)),
    )
    return make_server_certificate(directory, authority, addresses)


def make_server_certificate(
    directory: Path, authority: Path, addresses: Sequence[str], names: Sequence[str] = ("localhost",)
) -> Certificates:
    """Create a server certificate by the authority of :func:`make_certificates`, for these addresses and names."""
    directory.mkdir(parents=True, exist_ok=True)
    certificate, key, request = directory / "server.crt", directory / "server.key", directory / "server.csr"
    extensions = directory / "names"
    subjects = [*(f"DNS:{name}" for name in names), *(f"IP:{address}" for address in addresses)]
    extensions.write_text("subjectAltName=" + ",".join(subjects))
    _openssl("req", *_CURVE, "-subj", "/CN=kube-apiserver", "-keyout", str(key), "-out", str(request))
    _openssl(
        *("x509", "-req", "-in", str(request), "-CA", str(authority), "-CAkey", str(authority.with_suffix(".key"))),
        *("-CAcreateserial", "-days", "10", "-extfile", str(extensions), "-out", str(certificate)),
    )
    return Certificates(authority, certificate, key)


def make_client_certificate(directory: Path, name: str = "proxy", group: str = "") -> tuple[Path, Path]:
    """Create a client certificate and key by the authority that :func:`make_certificates` left in the directory.

    The API server takes the common name for the user's name, and the organization for that of a group.
    """
    certificate, key, request = directory / f"{name}.crt", directory / f"{name}.key", directory / f"{name}.csr"
    subject = f"/O={group}/CN={name}" if group else f"/CN={name}"
    _openssl("req", *_CURVE, "-subj", subject, "-keyout", str(key), "-out", str(request))
    authority = ("-CA", str(directory / "ca.crt"), "-CAkey", str(directory / "ca.key"), "-CAcreateserial")
    _openssl("x509", "-req", "-in", str(request), *authority, "-days", "10", "-out", str(certificate))
    return certificate, key


def write_kubeconfig(path: Path, server: str, authority: Path, token: str) -> Path:
    """Write a kubeconfig with a bearer token for the server's URL, readable by its owner only, and return its path."""
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "test",
        "clusters": [
            {
                "name": "test",
                "cluster": {
                    "server": server,
                    "certificate-authority-data": base64.b64encode(authority.read_bytes()).decode(),
                },
            }
        ],
        "users": [{"name": "proxy", "user": {"token": token}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "proxy"}}],
    }
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump(config, file, indent=1)
    return path
