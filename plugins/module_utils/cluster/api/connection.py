# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How to reach an API server and authenticate to it: from options, kubeconfig files, or a pod's ServiceAccount.

Only the standard library is imported, and PyYAML for a kubeconfig that is not JSON. A kubeconfig with an
``auth-provider`` needs the Python package kubernetes.
"""

from __future__ import annotations

import contextlib
import os
import ssl
import tempfile
import urllib.parse
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Tuple

from ...base.errors import ConfigurationError, errors_as, os_errors
from .access.credentials import AuthProvider, ClientCertificate, Credentials, Headers, TokenFile, basic, bearer
from .access.exec_plugin import ExecPlugin, exec_settings
from .access.kubeconfig import Choice, data_field, default_files, flag_field, read_choice, text_field
from .access.proxies import Proxy, environment_proxy, parse_proxy

_IN_CLUSTER_HOST, _IN_CLUSTER_PORT = "KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT"
_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
_PORTS = {"https": 443, "http": 80}


class ApiConnection(NamedTuple):
    """Options of a connection; None selects the kubeconfig's value or the default.

    Without ``kubeconfig``, ``context`` and ``host``, the ServiceAccount of the pod is used; outside a pod, the user's
    default kubeconfig.
    """

    #: Path of the file.
    kubeconfig: Optional[str] = None
    #: Name of a context in the kubeconfig.
    context: Optional[str] = None
    #: URL of the server.
    host: Optional[str] = None
    #: Bearer token.
    api_key: Optional[str] = None
    #: Paths of PEM files.
    ca_cert: Optional[str] = None
    client_cert: Optional[str] = None
    client_key: Optional[str] = None
    #: Whether to verify the server's certificate.
    validate_certs: Optional[bool] = None
    #: The name in the server's certificate, unless the kubeconfig has ``tls-server-name``; by default the host of the
    #: URL.
    server_name: Optional[str] = None


class Access(NamedTuple):
    """A connection with all its settings resolved.

    ``server``: URL without a trailing slash. ``authority``, ``authority_file``: PEM certificates of the authority that
    signs the server's certificate; if both are empty, the system's authorities are used. ``server_name``: the name in
    the server's certificate, if it differs from the host of the URL. ``proxy_url``: the kubeconfig's proxy, which takes
    precedence over those of the environment. ``warnings``: lines to show to the user.
    """

    server: str
    credentials: Credentials
    authority: bytes = b""
    authority_file: str = ""
    verify: bool = True
    server_name: str = ""
    proxy_url: str = ""
    compress: bool = True
    headers: Tuple[Tuple[str, str], ...] = ()
    warnings: Tuple[str, ...] = ()

    def authority_pem(self) -> bytes:
        """Return the certificates of the server's authority, empty if the system's authorities are used.

        Raises ConfigurationError.
        """
        if self.authority or not self.authority_file:
            return self.authority
        doing = f"{self.authority_file}: the file cannot be read"
        with os_errors(ConfigurationError, doing), open(self.authority_file, "rb") as file:
            return file.read()

    def address(self) -> Tuple[str, str, int]:
        """Return scheme, host and port of the server. Raises ConfigurationError."""
        return scheme_host_and_port(self.server)

    def proxy(self) -> Optional[Proxy]:
        """Return the proxy to the server, None for a direct connection. Raises ConfigurationError."""
        if self.proxy_url:
            return parse_proxy(self.proxy_url, "proxy-url")
        return environment_proxy(*self.address(), os.environ)

    def tls_context(self) -> ssl.SSLContext:
        """Return the settings of a TLS connection: at least TLS 1.2, with the server's certificate and name verified.

        Files are read on each call, so that the next connection uses renewed certificates. Raises ConfigurationError.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if not self.verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        elif self.authority or self.authority_file:
            _load_authority(context, self.authority_pem(), self.authority_file or "certificate-authority-data")
        else:
            context.load_default_certs(ssl.Purpose.SERVER_AUTH)
        certificate = self.credentials.certificate()
        if certificate is not None:
            _load_certificate(context, certificate)
        return context


def scheme_host_and_port(url: str) -> Tuple[str, str, int]:
    """Return scheme, host and port of the URL of a server. Raises ConfigurationError."""
    try:
        parts = urllib.parse.urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    plain = url.isascii() and url.isprintable() and " " not in url
    if not host or parts.scheme not in _PORTS or not plain:
        raise ConfigurationError(f"the server {url!r} is not an http or https URL")
    return parts.scheme, host, port or _PORTS[parts.scheme]


def resolve(connection: ApiConnection) -> Access:
    """Return how to reach the API server, without sending anything to it.

    Raises ConfigurationError for a kubeconfig or a file that cannot be used, ApiError if an auth-provider needs the
    Python package kubernetes and it is not installed.
    """
    if connection.kubeconfig or connection.context or not connection.host:
        if not connection.kubeconfig and not connection.context and os.environ.get(_IN_CLUSTER_HOST):
            access = _in_cluster()
        else:
            files = connection.kubeconfig or default_files()
            access = _of_choice(read_choice(files, connection.context or ""), files)
    else:
        access = Access("", Credentials())
    access = _with_options(access, connection)
    access.address()
    return access


def _in_cluster() -> Access:
    host, port = os.environ[_IN_CLUSTER_HOST], os.environ.get(_IN_CLUSTER_PORT) or "443"
    server = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
    return Access(server, TokenFile(f"{_ACCOUNT}/token"), authority_file=f"{_ACCOUNT}/ca.crt")


def _of_choice(choice: Choice, files: str) -> Access:
    cluster, user = choice.cluster, choice.user
    server = text_field(cluster, "server", files).rstrip("/")
    insecure = flag_field(cluster, "insecure-skip-tls-verify", files)
    authority, file = data_field(cluster, "certificate-authority-data", files), ""
    if not authority:
        file = text_field(cluster, "certificate-authority", files)
    if insecure and (authority or file):
        raise ConfigurationError(f"{files}: certificate-authority and insecure-skip-tls-verify are mutually exclusive")
    warning = f"{files}: insecure-skip-tls-verify: anyone between this host and {server} can impersonate the API server"
    return Access(
        server=server,
        credentials=_credentials(choice, files),
        authority=authority,
        authority_file=file,
        verify=not insecure,
        server_name=text_field(cluster, "tls-server-name", files),
        proxy_url=text_field(cluster, "proxy-url", files),
        compress=not flag_field(cluster, "disable-compression", files),
        headers=tuple(_impersonation(user, files)),
        warnings=(warning,) if insecure else (),
    )


def _credentials(choice: Choice, files: str) -> Credentials:
    """Return the user's credentials; as in client-go, a token file is preferred to a token, and both to a plugin."""
    user = choice.user
    certificate = _client_certificate(user, files)
    if text_field(user, "tokenFile", files):
        return TokenFile(user["tokenFile"], certificate)
    if text_field(user, "token", files):
        return Credentials(bearer(user["token"], f"{files}: token"), certificate)
    if user.get("exec") is not None:
        if not isinstance(user["exec"], dict):
            raise ConfigurationError(f"{files}: is not a valid kubeconfig: exec is not an object")
        return ExecPlugin(exec_settings(user["exec"], choice.folder, choice.cluster, files))
    if user.get("auth-provider") is not None:
        return AuthProvider(files, choice.context)
    if text_field(user, "username", files):
        return Credentials(basic(user["username"], text_field(user, "password", files)), certificate)
    return Credentials(certificate=certificate)


def _client_certificate(user: Dict[str, Any], files: str) -> Optional[ClientCertificate]:
    found = ClientCertificate(
        data_field(user, "client-certificate-data", files),
        data_field(user, "client-key-data", files),
        text_field(user, "client-certificate", files),
        text_field(user, "client-key", files),
    )
    has_certificate, has_key = found.certificate or found.certificate_file, found.key or found.key_file
    if bool(has_certificate) != bool(has_key):
        raise ConfigurationError(f"{files}: a client certificate and its key must be set together")
    return found if has_certificate else None


def _impersonation(user: Dict[str, Any], files: str) -> Headers:
    """Return the headers of the fields ``as``, ``as-uid`` and ``as-groups``."""
    groups: List[Any] = user.get("as-groups") or []
    if not isinstance(groups, list) or not all(isinstance(group, str) for group in groups):
        raise ConfigurationError(f"{files}: is not a valid kubeconfig: as-groups is not a list of strings")
    pairs = [
        ("Impersonate-User", text_field(user, "as", files)),
        ("Impersonate-Uid", text_field(user, "as-uid", files)),
    ]
    found = [(name, value) for name, value in [*pairs, *(("Impersonate-Group", group) for group in groups)] if value]
    if not all(value.isascii() and value.isprintable() for _name, value in found):
        raise ConfigurationError(f"{files}: is not a valid kubeconfig: a name to impersonate is not printable ASCII")
    return found


def _with_options(access: Access, connection: ApiConnection) -> Access:
    for path in (connection.ca_cert, connection.client_cert, connection.client_key):
        if path and not os.access(path, os.R_OK):
            raise ConfigurationError(f"{path}: the file cannot be read")
    if connection.host:
        access = access._replace(server=connection.host.rstrip("/"))
    if connection.ca_cert:
        access = access._replace(authority=b"", authority_file=connection.ca_cert)
    if connection.validate_certs is not None:
        access = access._replace(verify=connection.validate_certs, warnings=())
    if connection.server_name and not access.server_name:
        access = access._replace(server_name=connection.server_name)
    if connection.api_key or connection.client_cert or connection.client_key:
        given = access.credentials.certificate() or ClientCertificate()
        if connection.client_cert:
            given = given._replace(certificate=b"", certificate_file=connection.client_cert)
        if connection.client_key:
            given = given._replace(key=b"", key_file=connection.client_key)
        certificate = given if given != ClientCertificate() else None
        headers = bearer(connection.api_key, "api_key") if connection.api_key else []
        access = access._replace(credentials=Credentials(headers or access.credentials.headers(), certificate))
    return access


def _load_authority(context: ssl.SSLContext, pem: bytes, source: str) -> None:
    with errors_as(ConfigurationError, f"{source}: contains no PEM certificates", ssl.SSLError, ValueError):
        context.load_verify_locations(cadata=pem.decode("ascii"))


def _load_certificate(context: ssl.SSLContext, given: ClientCertificate) -> None:
    name = given.certificate_file or "client-certificate-data"
    try:
        with (
            _as_file(given.certificate, given.certificate_file) as certificate,
            _as_file(given.key, given.key_file) as key,
        ):
            context.load_cert_chain(certificate, key or None, password=_no_password)
    except OSError as error:
        # SSLError is an OSError, too, but has no file name.
        raise ConfigurationError(
            f"{error.filename or name}: the client certificate cannot be used: {error.strerror or error}"
        ) from error
    except ValueError as error:
        raise ConfigurationError(f"{name}: the client certificate cannot be used: {error}") from error


def _no_password() -> str:
    """Raise ValueError, so that OpenSSL does not prompt for the password of an encrypted key."""
    raise ValueError("the key is encrypted")


@contextlib.contextmanager
def _as_file(data: bytes, path: str) -> Iterator[str]:
    """Return the path of a file with these data, or the given path if there are none. Raises OSError.

    OpenSSL reads certificates and keys from files only. On Linux the file is in memory, so that a file system that is
    full or read-only does not matter; elsewhere it is a temporary file, which only its owner can read.
    """
    if not data:
        yield path
        return
    in_memory = hasattr(os, "memfd_create")
    with (
        os.fdopen(os.memfd_create("credentials", os.MFD_CLOEXEC), "wb")
        if in_memory
        else tempfile.NamedTemporaryFile() as file
    ):
        file.write(data)
        file.flush()
        yield f"/proc/self/fd/{file.fileno()}" if in_memory else file.name
