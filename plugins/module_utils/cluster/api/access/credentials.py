# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Credentials of a request: fixed headers, token files, exec plugins and auth providers.

Credentials that expire are renewed as in client-go: a token file is read again after a minute, an exec plugin runs
again when its credential has expired, and both do so immediately after the API server answered 401.
"""

from __future__ import annotations

import base64
import time
from typing import Any, Callable, NamedTuple, Optional

from ....base.errors import ApiError, ConfigurationError, errors_as
from ....base.regular_files import read_with_own_links

#: client-go's period for token files (k8s.io/client-go/transport, NewCachedFileTokenSource).
TOKEN_FILE_SECONDS = 60.0
_MAXIMUM_TOKEN_BYTES = 1 << 20

Headers = list[tuple[str, str]]


class ClientCertificate(NamedTuple):
    """A client certificate and its key as PEM bytes, or as paths of files if the bytes are empty."""

    certificate: bytes = b""
    key: bytes = b""
    certificate_file: str = ""
    key_file: str = ""


def fits_a_header(text: str) -> bool:
    """Return whether a text may be the value of a header (RFC 9110, 5.5), in UTF-8: it has no control characters."""
    return not any((character < " " and character != "\t") or character == "\x7f" for character in text)


def bearer(token: str, source: str) -> Headers:
    """Return the header for a bearer token. Raises ConfigurationError, which never shows the token."""
    if not token:
        raise ConfigurationError(f"{source}: the token is empty")
    if not fits_a_header(token):
        raise ConfigurationError(f"{source}: the token contains characters that are not allowed in an HTTP header")
    return [("Authorization", f"Bearer {token}")]


def basic(user: str, password: str) -> Headers:
    """Return the header for HTTP basic authentication (RFC 7617)."""
    return [("Authorization", "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode("ascii"))]


class Credentials:
    """Credentials that never change: headers, and a client certificate for the TLS handshake.

    Subclasses renew theirs. An object belongs to one connection and is used by one thread.
    """

    def __init__(self, headers: Optional[Headers] = None, certificate: Optional[ClientCertificate] = None) -> None:
        self._headers = headers or []
        self._certificate = certificate

    def headers(self) -> Headers:
        """Return the headers for the next request. Raises ConfigurationError or ApiError."""
        return self._headers

    def certificate(self) -> Optional[ClientCertificate]:
        """Return the certificate for the next connection; call :meth:`headers` first."""
        return self._certificate

    def rejected(self) -> None:
        """Renew the credentials before the next request; called when the API server answered 401."""


class TokenFile(Credentials):
    """A bearer token in a file that another program renews. ``clock``: a monotonic clock in seconds.

    While the file cannot be read, the last token remains in use, as in client-go; at first ``token``, if there is one.
    """

    def __init__(
        self,
        path: str,
        certificate: Optional[ClientCertificate] = None,
        clock: Callable[[], float] = time.monotonic,
        token: str = "",
    ) -> None:
        super().__init__(bearer(token, path) if token else None, certificate)
        self._path = path
        self._clock = clock
        self._due: Optional[float] = None

    def headers(self) -> Headers:
        """Return the header with the token, reading the file again after a minute. Raises ConfigurationError."""
        if self._due is None or self._clock() >= self._due:
            try:
                self._headers = bearer(self._read(), self._path)
            except ConfigurationError:
                if not self._headers:
                    raise
            self._due = self._clock() + TOKEN_FILE_SECONDS
        return self._headers

    def rejected(self) -> None:
        """Read the file again before the next request."""
        self._due = self._clock()

    def _read(self) -> str:
        try:
            return read_with_own_links(self._path, _MAXIMUM_TOKEN_BYTES).decode("utf-8").strip()
        except UnicodeDecodeError as error:
            raise ConfigurationError(f"{self._path}: the token is not UTF-8 text") from error
        except OSError as error:
            raise ConfigurationError(f"{self._path}: the token file cannot be read: {error.strerror}") from error


class AuthProvider(Credentials):
    """The ``auth-provider`` of a kubeconfig user, a deprecated mechanism left to the Python package kubernetes.

    Providers other than ``oidc`` have been removed from kubectl.
    """

    def __init__(self, name: str, files: str, context: str) -> None:
        super().__init__()
        if name != "oidc":
            raise ConfigurationError(f"{files}: the auth-provider {name!r} is not known, only oidc; use exec instead")
        needs = f"{files}: the user has an auth-provider, which needs the Python package kubernetes"
        with errors_as(ApiError, needs, ImportError):
            from kubernetes import client, config
        self._configuration: Any = client.Configuration()
        # The package runs the provider's code and does not document what that may raise.
        with errors_as(ConfigurationError, f"{files}: the auth-provider does not work", Exception):
            config.load_kube_config(
                config_file=files,
                context=context or None,
                client_configuration=self._configuration,
                persist_config=False,
            )

    def headers(self) -> Headers:
        """Return the provider's headers; the package renews them in this call."""
        settings: dict[str, dict[str, Any]] = self._configuration.auth_settings()
        return [
            (str(setting["key"]), str(setting["value"]))
            for setting in settings.values()
            if setting.get("in") == "header" and setting.get("value")
        ]
