# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Puts a form on the disk, beside a server that records, and makes what happened independent of the run."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import ssl
import subprocess
import tempfile
from pathlib import Path
from typing import Any, Iterator, Optional

from tests.apiserver.tls import Certificates, make_certificates, make_client_certificate, make_server_certificate

from .form import Form
from .witness import Witness

#: Variables of the environment that a kubeconfig or a proxy depends on; a form has its own.
_OTHERS = ("KUBECONFIG", "KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT", "POD_NAMESPACE", "GIVEN", "VERSION")
_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")
_NOBODY = 65534


def _encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


class Laboratory:
    """Certificates, and a witness that presents one for localhost and api.example."""

    def __init__(self, folder: Path) -> None:
        authority = make_certificates(folder / "tls").authority
        names = ("localhost", "api.example")
        made: Certificates = make_server_certificate(folder / "tls", authority, ("127.0.0.1", "::1"), names)
        certificate, key = make_client_certificate(folder / "tls", "jane")
        self.witness = Witness(made)
        ca, cert, private = authority.read_bytes(), certificate.read_bytes(), key.read_bytes()
        broken = b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"
        lines = _encoded(ca)
        self._values = {
            "PORT": str(self.witness.port),
            "CA": lines,
            "CALINES": "\n".join(lines[at : at + 60] for at in range(0, len(lines), 60)),
            "CABLANKS": " ".join(lines[at : at + 60] for at in range(0, len(lines), 60)),
            "CABARE": _encoded(ca + b"\n" * (1 + -len(ca) % 3)).rstrip("="),
            "CATEXT": _encoded(b"the authority\n" + ca),
            "CABROKEN": _encoded(ca + broken),
            "CADER": _encoded(ssl.PEM_cert_to_DER_cert(ca.decode())),
            "CAPEM": ca.decode(),
            "CERTPEM": cert.decode(),
            "KEYPEM": private.decode(),
            "CERT": _encoded(cert),
            "KEY": _encoded(private),
            "PAIR": _encoded(cert + private),
        }

    @contextlib.contextmanager
    def placed(self, form: Form) -> Iterator[Placed]:
        """Yield the form in a new directory that everybody may read."""
        with tempfile.TemporaryDirectory(prefix="kubeconfig") as name:
            folder = Path(name)
            folder.chmod(0o755)
            values = {**self._values, "DIR": name}
            for path, content in form.files.items():
                _write(folder / path, path, _filled(content, values))
            for path in form.unreadable:
                (folder / path).chmod(0)
            self.witness.hops.clear()
            yield Placed(form, folder, values, self.witness)


def _filled(content: str, values: dict[str, str]) -> str:
    """Replace the marks; those in JSON are escaped as JSON."""
    as_json = content.lstrip("\ufeff").startswith("{")
    for key, value in values.items():
        content = content.replace(f"@{key}@", json.dumps(value)[1:-1] if as_json else value)
    return content


def _write(target: Path, path: str, content: str) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if path.endswith("/"):
        target.mkdir()
    elif content.startswith("->"):
        target.symlink_to(content[2:])
    else:
        target.write_bytes(content.encode())
        target.chmod(0o755 if content.startswith("#!") else 0o644)


class Placed:
    """A form on the disk."""

    def __init__(self, form: Form, folder: Path, values: dict[str, str], witness: Witness) -> None:
        self.form = form
        self.folder = folder
        self._values = values
        self._witness = witness
        self.listed = None if form.listed is None else _filled(form.listed, values)

    @property
    def environment(self) -> dict[str, str]:
        """The whole environment of a client."""
        names = {*_OTHERS, *_PROXIES, *(name.lower() for name in _PROXIES)}
        kept = {name: value for name, value in os.environ.items() if name not in names}
        own = {name: _filled(value, self._values) for name, value in self.form.environment.items()}
        if self.listed is not None and not self.form.explicit:
            own["KUBECONFIG"] = self.listed
        return {**kept, "HOME": str(self.folder / "home"), **own}

    def outcome(self, refusal: Optional[str]) -> dict[str, Any]:
        """Return what happened: a refusal, or what reached the server."""
        if refusal is not None:
            return {"refused": self._portable(refusal)}
        hops: list[Any] = json.loads(self._portable(json.dumps(self._witness.hops)))
        return {"hops": hops}

    def _portable(self, content: str) -> str:
        for mark in ("DIR", "CA", "PORT"):
            content = content.replace(self._values[mark], f"@{mark}@")
        return content


def ask_kubectl(kubectl: str, placed: Placed) -> dict[str, Any]:
    """Return what kubectl makes of a form.

    For its version, each kubectl keeps the path in the URL of the server, unlike for ``get --raw``.
    """
    words = [kubectl, "version", "--output=json", "--request-timeout=10s"]
    if placed.form.context:
        words += ["--context", placed.form.context]
    if placed.form.explicit:
        words += ["--kubeconfig", str(placed.listed)]
    done = subprocess.run(
        words,
        env=placed.environment,
        cwd=placed.folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
        user=_NOBODY if placed.form.unreadable and os.geteuid() == 0 else None,
    )
    reason = " ".join(done.stderr.decode("utf-8", "replace").split())
    return placed.outcome(reason if done.returncode else None)
