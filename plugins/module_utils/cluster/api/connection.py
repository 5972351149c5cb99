# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How to reach an API server and authenticate to it: from options, kubeconfig files, or a pod's ServiceAccount.

Only the standard library is imported, and PyYAML for a kubeconfig that is not JSON. A kubeconfig with an
``auth-provider`` needs the Python package kubernetes.
"""

from __future__ import annotations

import base64
import contextlib
import os
import posixpath
import re
import ssl
import tempfile
import urllib.parse
from typing import Any, Iterator, NamedTuple, Optional

from ...base.errors import ConfigurationError, os_errors
from .access.credentials import (
    AuthProvider,
    ClientCertificate,
    Credentials,
    Headers,
    TokenFile,
    basic,
    bearer,
    fits_a_header,
)
from .access.exec_plugin import ExecPlugin, exec_settings
from .access.kubeconfig import Choice, default_files, read_choice
from .access.proxies import Proxy, environment_proxy, parse_proxy

_IN_CLUSTER_HOST, _IN_CLUSTER_PORT = "KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT"
_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
_PORTS = {"https": 443, "http": 80}
#: Name of the extension of a cluster for an exec plugin.
_PLUGIN_EXTENSION = "client.authentication.k8s.io/exec"
#: Characters of a header's name (RFC 9110, 5.6.2) beside letters and digits, without the percent sign.
_NAME_CHARACTERS = "!#$&'*+-.^_`|~"
_CERTIFICATE = re.compile("-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)


class ApiConnection(NamedTuple):
    """Options of a connection; None selects the kubeconfig's value or the default.

    Without ``kubeconfig``, ``context`` and ``host``, the user's default kubeconfig is used; in a pod without one, its
    ServiceAccount.
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
    headers: tuple[tuple[str, str], ...] = ()
    warnings: tuple[str, ...] = ()

    def authority_pem(self) -> bytes:
        """Return the certificates of the server's authority, empty if the system's authorities are used.

        Raises ConfigurationError.
        """
        if self.authority or not self.authority_file:
            return self.authority
        doing = f"{self.authority_file}: the file cannot be read"
        with os_errors(ConfigurationError, doing), open(self.authority_file, "rb") as file:
            return file.read()

    def address(self) -> tuple[str, str, int]:
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


def scheme_host_and_port(url: str) -> tuple[str, str, int]:
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
        files = connection.kubeconfig or default_files()
        existing = any(os.path.exists(os.path.expanduser(path)) for path in files.split(os.pathsep))
        if connection.kubeconfig or connection.context or existing or not os.environ.get(_IN_CLUSTER_HOST):
            access = _of_choice(read_choice(files, connection.context or ""), files, connection)
        else:
            access = _in_cluster()
    else:
        access = Access("", Credentials())
    access = _with_options(access, connection)
    access.address()
    return access


def _in_cluster() -> Access:
    host, port = os.environ[_IN_CLUSTER_HOST], os.environ.get(_IN_CLUSTER_PORT) or "443"
    server = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
    return Access(server, TokenFile(f"{_ACCOUNT}/token"), authority_file=f"{_ACCOUNT}/ca.crt")


def server_url(url: str) -> str:
    """Return the server of a kubeconfig as client-go understands it. Raises ConfigurationError.

    Without a scheme, it is http; the path is shortened (RFC 3986, 5.2.4), and what follows it is ignored.
    """
    scheme, mark, rest = url.partition("://")
    if not mark:
        scheme, rest = "http", url
    place, _slash, path = rest.partition("?")[0].partition("/")
    prefix = posixpath.normpath("/" + urllib.parse.unquote(path).lstrip("/")).rstrip("/")
    if not mark and prefix:
        raise ConfigurationError(f"the server {url!r} has no scheme")
    return f"{scheme.lower()}://{place.partition('#')[0]}{urllib.parse.quote(prefix, safe='$&+,/:;=@~')}"


def _of_choice(choice: Choice, files: str, connection: ApiConnection) -> Access:
    """Return the access of a context, to another server if the options name one.

    Raises ConfigurationError for what kubectl refuses (k8s.io/client-go/tools/clientcmd, ConfirmUsable).
    """
    cluster, user = choice.cluster, choice.user
    server = server_url(cluster.get("server", ""))
    login, at, place = server.partition("://")[2].partition("/")[0].rpartition("@")
    if at:
        server = server.replace(f"{login}@{place}", place, 1)
    scheme = (connection.host or server).partition("://")[0].lower()
    insecure = cluster.get("insecure-skip-tls-verify", False)
    for wrong, reason in _contradictions(cluster, user, insecure and scheme == "https"):
        if wrong:
            raise ConfigurationError(f"{files}: {reason}")
    warning = f"{files}: insecure-skip-tls-verify: anyone between this host and {server} can impersonate the API server"
    access = Access(
        server=server,
        credentials=Credentials(),
        authority=cluster.get("certificate-authority-data", b""),
        authority_file=cluster.get("certificate-authority", ""),
        verify=not insecure,
        server_name=cluster.get("tls-server-name", ""),
        proxy_url=cluster.get("proxy-url", ""),
        compress=not cluster.get("disable-compression", False),
        headers=tuple(_impersonation(user, files)),
        warnings=(warning,) if insecure else (),
    )
    given = _credentials(choice, access, files)
    if login:
        name, _colon, password = (urllib.parse.unquote(part) for part in login.partition(":"))
        return access._replace(credentials=Credentials(basic(name, password), given.certificate() if given else None))
    if scheme != "https":
        # As kubectl, send no secret in the clear.
        return access
    if given is None and not (connection.api_key or connection.client_cert):
        raise ConfigurationError(f"{files}: the user of context {choice.context!r} has no credentials")
    return access._replace(credentials=given or Credentials())


def _contradictions(cluster: dict[str, Any], user: dict[str, Any], insecure: bool) -> Iterator[tuple[Any, str]]:
    """Yield whether fields contradict each other, and the reason."""
    for fields, kind in ((cluster, "certificate-authority"), (user, "client-certificate"), (user, "client-key")):
        # A key without a certificate is ignored.
        if kind != "client-key" or _has_certificate(user):
            yield fields.get(kind) and fields.get(f"{kind}-data"), f"{kind} and {kind}-data are mutually exclusive"
    authority = cluster.get("certificate-authority") or cluster.get("certificate-authority-data")
    yield insecure and authority, "certificate-authority and insecure-skip-tls-verify are mutually exclusive"
    key = user.get("client-key") or user.get("client-key-data")
    yield _has_certificate(user) and not key, "a client certificate and its key must be set together"
    login = user.get("username") or user.get("password")
    yield login and (user.get("token") or user.get("tokenFile")), "a token and a password are mutually exclusive"
    yield "exec" in user and "auth-provider" in user, "exec and auth-provider are mutually exclusive"
    others = user.get("as-uid") or user.get("as-groups") or user.get("as-user-extra")
    yield others and not user.get("as"), "as-uid, as-groups and as-user-extra need a user, as"


def _has_certificate(user: dict[str, Any]) -> bool:
    return bool(user.get("client-certificate") or user.get("client-certificate-data"))


def _credentials(choice: Choice, access: Access, files: str) -> Optional[Credentials]:
    """Return the user's credentials, None if it has none.

    As in client-go, a token file is preferred to a token, and everything else to a plugin.
    """
    user = choice.user
    certificate = None
    if _has_certificate(user):
        kinds = ("client-certificate-data", "client-key-data", "client-certificate", "client-key")
        certificate = ClientCertificate(*(user.get(kind, b"" if kind.endswith("data") else "") for kind in kinds))
    plugin = None
    if "exec" in user:
        plugin = exec_settings(user["exec"], _cluster_information(choice.cluster, access), files)
    if "auth-provider" in user:
        return AuthProvider(user["auth-provider"].get("name", ""), choice.files, choice.context)
    if user.get("tokenFile"):
        return TokenFile(user["tokenFile"], certificate, token=user.get("token", ""))
    if user.get("token"):
        return Credentials(bearer(user["token"], f"{files}: token"), certificate)
    if user.get("username"):
        return Credentials(basic(user["username"], user.get("password", "")), certificate)
    if certificate is not None:
        return Credentials(certificate=certificate)
    return ExecPlugin(plugin) if plugin is not None else None


def _cluster_information(cluster: dict[str, Any], access: Access) -> dict[str, Any]:
    """Return what a plugin may know of the cluster (client.authentication.k8s.io/v1, Cluster)."""
    same = ("server", "tls-server-name", "insecure-skip-tls-verify", "proxy-url", "disable-compression")
    known = {name: cluster[name] for name in same if cluster.get(name)}
    if access.authority or access.authority_file:
        known["certificate-authority-data"] = base64.b64encode(access.authority_pem()).decode()
    own = [item for item in cluster.get("extensions", []) if item.get("name") == _PLUGIN_EXTENSION]
    return {**known, "config": own[0].get("extension") if own else None}


def _impersonation(user: dict[str, Any], files: str) -> Headers:
    """Return the headers of the fields ``as``, ``as-uid``, ``as-groups`` and ``as-user-extra``."""
    pairs = [("User", user.get("as")), ("Uid", user.get("as-uid"))]
    pairs += [("Group", group) for group in user.get("as-groups", [])]
    for key, values in user.get("as-user-extra", {}).items():
        pairs += [(f"Extra-{urllib.parse.quote(key, safe=_NAME_CHARACTERS)}", value) for value in values]
    found = [(f"Impersonate-{name}", value) for name, value in pairs if value]
    if not all(fits_a_header(value) for _name, value in found):
        raise ConfigurationError(f"{files}: is not a valid kubeconfig: a name to impersonate is not printable")
    return found


def _with_options(access: Access, connection: ApiConnection) -> Access:
    for path in (connection.ca_cert, connection.client_cert, connection.client_key):
        if path and not os.access(path, os.R_OK):
            raise ConfigurationError(f"{path}: the file cannot be read")
    if connection.host:
        if "@" in connection.host:
            raise ConfigurationError("host: it has a user name, and is shown in errors: use api_key or a kubeconfig")
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
    """Trust the certificates that can be read, as kubectl; others beside them are ignored."""
    for certificate in _CERTIFICATE.findall(pem.decode("ascii", "replace")):
        with contextlib.suppress(ssl.SSLError, ValueError):
            context.load_verify_locations(cadata=certificate)
    if not context.cert_store_stats()["x509"]:
        raise ConfigurationError(f"{source}: contains no PEM certificates")


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
