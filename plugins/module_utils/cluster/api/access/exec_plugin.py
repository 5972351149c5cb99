# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Credentials from an exec plugin (client.authentication.k8s.io, KEP-541): a program that prints an ExecCredential."""

from __future__ import annotations

import datetime
import json
import os
import re
import subprocess
import time
from typing import Any, Callable, Mapping, NamedTuple, Optional

from ....base.errors import ApiError, ConfigurationError
from .credentials import ClientCertificate, Credentials, Headers, bearer

_VERSIONS = ("client.authentication.k8s.io/v1", "client.authentication.k8s.io/v1beta1")
_PLUGIN_SECONDS = 60.0
_SHOWN_CHARACTERS = 200
_RFC3339 = re.compile(
    r"([0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2})(?:\.[0-9]+)?(Z|z|[+-][0-9]{2}:[0-9]{2})"
)

Run = Callable[..., "subprocess.CompletedProcess[bytes]"]


class ExecSettings(NamedTuple):
    """The ``exec`` field of a kubeconfig user. ``cluster``: its cluster, if the plugin requires it."""

    api_version: str
    command: str
    arguments: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    install_hint: str = ""
    cluster: Optional[Mapping[str, Any]] = None


def exec_settings(given: Mapping[str, Any], cluster: Mapping[str, Any], source: str) -> ExecSettings:
    """Return the checked ``exec`` field of a user. ``cluster``: what the plugin gets if it requests it.

    Raises ConfigurationError, naming ``source``.
    """
    version, command = given.get("apiVersion"), given.get("command", "")
    if version not in _VERSIONS:
        raise ConfigurationError(f"{source}: exec.apiVersion is not one of {', '.join(_VERSIONS)}")
    if not command:
        raise ConfigurationError(f"{source}: exec.command is missing")
    mode = given.get("interactiveMode") or ("" if version == _VERSIONS[0] else "IfAvailable")
    if mode not in ("Never", "IfAvailable"):
        raise ConfigurationError(f"{source}: exec.interactiveMode is not Never or IfAvailable; there is no terminal")
    environment = tuple((item.get("name", ""), item.get("value", "")) for item in given.get("env", []))
    if not all(name for name, _value in environment):
        raise ConfigurationError(f"{source}: exec.env has a variable without a name")
    return ExecSettings(
        api_version=str(version),
        command=command,
        arguments=tuple(given.get("args", [])),
        environment=environment,
        install_hint=given.get("installHint", ""),
        cluster=cluster if given.get("provideClusterInfo") else None,
    )


class ExecPlugin(Credentials):
    """The credential of an exec plugin, kept until it expires or the API server answers 401.

    ``now`` returns seconds since the epoch, to which expiry times refer. ``run`` replaces :func:`subprocess.run`.
    """

    def __init__(self, settings: ExecSettings, now: Callable[[], float] = time.time, run: Run = subprocess.run) -> None:
        super().__init__()
        self._settings = settings
        self._now = now
        self._run = run
        self._known = False
        self._expires: Optional[float] = None

    def headers(self) -> Headers:
        """Return the plugin's token as a header, running the plugin if there is no valid token.

        Raises ApiError if the plugin fails.
        """
        if not self._known or (self._expires is not None and self._now() >= self._expires):
            self._renew()
        return self._headers

    def rejected(self) -> None:
        """Run the plugin again before the next request."""
        self._known = False

    def _renew(self) -> None:
        self._known = False
        status = self._credential(self._output())
        token = status.get("token")
        certificate, key = status.get("clientCertificateData"), status.get("clientKeyData")
        if not all(value is None or isinstance(value, str) for value in (token, certificate, key)):
            raise self._failure("the status of its ExecCredential contains values that are not strings")
        if bool(certificate) != bool(key):
            raise self._failure("its ExecCredential contains only one of certificate and key")
        if not token and not certificate:
            raise self._failure("its ExecCredential contains neither a token nor a certificate")
        self._expires = self._expiry(status.get("expirationTimestamp"))
        self._headers = bearer(token, self._settings.command) if token else []
        self._certificate = ClientCertificate(certificate.encode(), str(key).encode()) if certificate else None
        self._known = True

    def _output(self) -> bytes:
        settings = self._settings
        spec: dict[str, Any] = {"interactive": False}
        if settings.cluster is not None:
            spec["cluster"] = dict(settings.cluster)
        information = {"kind": "ExecCredential", "apiVersion": settings.api_version, "spec": spec}
        environment = {**os.environ, **dict(settings.environment), "KUBERNETES_EXEC_INFO": json.dumps(information)}
        try:
            done = self._run(
                [settings.command, *settings.arguments],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                timeout=_PLUGIN_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise self._failure(f"timed out after {_PLUGIN_SECONDS:g} seconds") from error
        except (OSError, ValueError) as error:
            hint = f" ({settings.install_hint[:_SHOWN_CHARACTERS]})" if settings.install_hint else ""
            raise self._failure(f"cannot be run: {getattr(error, 'strerror', None) or error}{hint}") from error
        if done.returncode:
            last = done.stderr.decode("utf-8", "replace").strip()[-_SHOWN_CHARACTERS:]
            raise self._failure(f"exited with status {done.returncode}: {last or 'no message'}")
        return done.stdout

    def _credential(self, output: bytes) -> dict[str, Any]:
        try:
            credential = json.loads(output)
        except (ValueError, RecursionError) as error:
            raise self._failure("its output is not JSON") from error
        if not isinstance(credential, dict) or credential.get("kind") != "ExecCredential":
            raise self._failure("its output is not an ExecCredential")
        if credential.get("apiVersion") != self._settings.api_version:
            raise self._failure(f"its ExecCredential is not of version {self._settings.api_version}")
        status = credential.get("status")
        if not isinstance(status, dict):
            raise self._failure("its ExecCredential has no status")
        return status

    def _expiry(self, text: Any) -> Optional[float]:
        if text is None:
            return None
        found = _RFC3339.fullmatch(text) if isinstance(text, str) else None
        try:
            if found is None:
                raise ValueError(text)
            # Ignore fractions of a second, which Go prints with up to nine digits.
            return datetime.datetime.fromisoformat(found[1] + found[2].upper().replace("Z", "+00:00")).timestamp()
        except (ValueError, OverflowError) as error:
            raise self._failure("expirationTimestamp is not an RFC 3339 time") from error

    def _failure(self, reason: str) -> ApiError:
        return ApiError(f"exec plugin {self._settings.command}: {reason}")
