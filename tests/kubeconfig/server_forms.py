# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Servers, their certificate authorities, and proxies to them."""

from __future__ import annotations

from typing import Any, Iterator

from .form import HTTP, TLS, Form, dashed, one


def servers() -> Iterator[Form]:
    ca = {"certificate-authority-data": "@CA@"}
    via = {"proxy-url": "http://127.0.0.1:@PORT@"}

    def server(name: str, url: Any, **cluster: Any) -> Form:
        return one(f"server: {name}", None, {"server": url, **ca, **cluster})

    yield server("trailing slash", TLS + "/")
    yield server("two trailing slashes", TLS + "//")
    yield server("path", TLS + "/a/b")
    yield server("path with trailing slash", TLS + "/a/b/")
    yield server("path with two slashes", TLS + "/a//b")
    yield server("path with dots", TLS + "/a/../b")
    yield server("path with a blank", TLS + "/a b")
    yield server("path with an escape", TLS + "/a%20b")
    yield server("path with an escaped slash", TLS + "/a%2Fb")
    yield server("path beyond ASCII", TLS + "/ä")
    yield server("path and query", TLS + "/a?b=c")
    yield server("path and fragment", TLS + "/a#b")
    yield server("query", TLS + "?b=c")
    yield server("fragment", TLS + "#b")
    yield server("name", "https://localhost:@PORT@")
    yield server("capitals", "https://LOCALHOST:@PORT@")
    yield server("scheme in capitals", "HTTPS://127.0.0.1:@PORT@")
    yield server("IPv6", "https://[::1]:@PORT@")
    yield server("IPv6 without brackets", "https://::1:@PORT@")
    yield server("zone", "https://[::1%25lo]:@PORT@")
    yield server("without a scheme", "127.0.0.1:@PORT@")
    yield server("name without a scheme", "localhost:@PORT@")
    yield server("without a scheme, with a path", "127.0.0.1:@PORT@/a")
    yield server("without a scheme, with a slash", "127.0.0.1:@PORT@/")
    yield one("server: without scheme and authority", None, {"server": "127.0.0.1:@PORT@"})
    yield one("server: name without scheme and authority", None, {"server": "localhost:@PORT@"})
    yield one(
        "server: without scheme, insecure", None, {"server": "127.0.0.1:@PORT@", "insecure-skip-tls-verify": True}
    )
    yield server("scheme only", "https://")
    yield server("another scheme", "ftp://127.0.0.1:@PORT@")
    yield server("user in the URL", "https://me:secret@127.0.0.1:@PORT@")
    yield server("blank before", " " + TLS)
    yield server("blank after", TLS + " ")
    yield server("newline after", TLS + "\n")
    yield server("port of letters", "https://127.0.0.1:abc")
    yield server("port too large", "https://127.0.0.1:70000")
    yield server("port empty", "https://api.example:", **via)
    yield server("no port, https", "https://api.example", **via)
    yield one("server: no port, http", None, {"server": "http://api.example", **via})
    yield server("final dot", "https://localhost.:@PORT@", **via)
    yield server("underscore", "https://a_b:@PORT@", **via, **{"tls-server-name": "localhost"})
    yield server("empty", "")
    yield server("missing", None)
    yield server("number", 5)
    yield one("server: http without TLS has no credentials", {"token": "t", "as": "jane"}, {"server": HTTP})
    yield one("server: http, name and password", {"username": "u", "password": "p"}, {"server": HTTP})
    yield one("server: http with a path", None, {"server": HTTP + "/a/"})
    yield one("server: http with an authority", None, {"server": HTTP, **ca})
    yield one("server: http, insecure", None, {"server": HTTP, "insecure-skip-tls-verify": True})


def trust() -> Iterator[Form]:
    files = {"ca.pem": "@CAPEM@"}

    def trust(name: str, **cluster: Any) -> Form:
        return one(f"trust: {name}", None, {"server": TLS, **dashed(cluster)}, files)

    yield trust("no authority")
    yield trust("file", certificate_authority="ca.pem")
    yield trust("file in a parent", certificate_authority="./x/../ca.pem")
    yield trust("absolute file", certificate_authority="@DIR@/ca.pem")
    yield trust("tilde in the path", certificate_authority="~/ca.pem")
    yield trust("missing file", certificate_authority="none.pem")
    yield trust("empty path", certificate_authority="")
    yield trust("data and file", certificate_authority="ca.pem", certificate_authority_data="@CA@")
    yield trust("data and missing file", certificate_authority="none.pem", certificate_authority_data="@CA@")
    yield trust("data that is not base64", certificate_authority_data="%%")
    yield trust("data with line ends", certificate_authority_data="@CALINES@")
    yield trust("data without padding", certificate_authority_data="@CABARE@")
    yield trust("data with blanks", certificate_authority_data="@CABLANKS@")
    yield trust("data is PEM", certificate_authority_data="@CAPEM@")
    yield trust("data has no certificate", certificate_authority_data="AAAA")
    yield trust("data is empty", certificate_authority_data="")
    yield trust("data with text beside", certificate_authority_data="@CATEXT@")
    yield trust("data with a broken certificate beside", certificate_authority_data="@CABROKEN@")
    yield trust("data is DER", certificate_authority_data="@CADER@")
    yield trust("insecure", insecure_skip_tls_verify=True)
    yield trust("insecure with data", insecure_skip_tls_verify=True, certificate_authority_data="@CA@")
    yield trust("insecure with a file", insecure_skip_tls_verify=True, certificate_authority="ca.pem")
    yield trust("insecure with a missing file", insecure_skip_tls_verify=True, certificate_authority="none.pem")
    yield trust("insecure with a name", insecure_skip_tls_verify=True, tls_server_name="elsewhere.example")
    yield trust("secure with data", insecure_skip_tls_verify=False, certificate_authority_data="@CA@")
    yield trust("server name", tls_server_name="localhost", certificate_authority_data="@CA@")
    yield trust("server name in capitals", tls_server_name="LOCALHOST", certificate_authority_data="@CA@")
    yield trust("wrong server name", tls_server_name="elsewhere.example", certificate_authority_data="@CA@")
    yield trust("server name is an address", tls_server_name="127.0.0.1", certificate_authority_data="@CA@")
    yield trust("server name is empty", tls_server_name="", certificate_authority_data="@CA@")
    yield trust("without compression", disable_compression=True, certificate_authority_data="@CA@")
    yield trust("extensions", extensions=[{"name": "e", "extension": {}}], certificate_authority_data="@CA@")


def proxies() -> Iterator[Form]:
    here = "127.0.0.1:@PORT@"

    def proxy(name: str, url: Any, server: str = "https://api.example:8443", **environment: str) -> Form:
        cluster = {"server": server, "certificate-authority-data": "@CA@", "proxy-url": url}
        return one(f"proxy: {name}", None, cluster, environment=environment)

    yield proxy("http", f"http://{here}")
    yield proxy("http, plain server", f"http://{here}", "http://api.example:8080/a")
    yield proxy("http, plain server without a port", f"http://{here}", "http://API.example")
    yield proxy("https", "https://localhost:@PORT@")
    yield proxy("socks5", f"socks5://{here}")
    yield proxy("socks5, plain server", f"socks5://{here}", "http://api.example:8080")
    yield proxy("socks5, address", f"socks5://{here}", "https://127.0.0.1:8443")
    yield proxy("socks5, IPv6 address", f"socks5://{here}", "https://[::1]:8443")
    yield proxy("socks5, password", f"socks5://me:secret@{here}")
    yield proxy("socks5h", f"socks5h://{here}")
    yield proxy("socks4", f"socks4://{here}")
    yield proxy("scheme in capitals", f"HTTP://{here}")
    yield proxy("without a scheme", here)
    yield proxy("name without a scheme", "localhost:@PORT@")
    yield proxy("password", f"http://me:s%40cret@{here}")
    yield proxy("user only", f"http://me@{here}")
    yield proxy("path", f"http://{here}/path")
    yield proxy("IPv6", "http://[::1]:@PORT@")
    yield proxy("empty", "", TLS)
    yield proxy("not a URL", "http://[")
    yield proxy("no host", "http://", TLS)
    yield proxy("loopback server", f"http://{here}", "https://127.0.0.1:8443")
    yield proxy("IPv6 server", f"http://{here}", "https://[::1]:8443")
    yield proxy("over NO_PROXY", f"http://{here}", NO_PROXY="*")
    yield proxy("over the environment", f"http://{here}", HTTPS_PROXY="http://127.0.0.1:1")
    yield proxy("of the environment", "", HTTPS_PROXY=f"http://{here}")
    yield proxy("of the environment, small letters", "", https_proxy=here)
    yield proxy("of the environment, plain server", "", "http://api.example", HTTP_PROXY=here)
    yield proxy("of the environment, other scheme", "", TLS, HTTP_PROXY="http://127.0.0.1:1")
    yield proxy("of the environment, socks5", "", HTTPS_PROXY=f"socks5://{here}")
    yield proxy("of the environment, https", "", HTTPS_PROXY="https://localhost:@PORT@")
    yield proxy("of ALL_PROXY", "", TLS, ALL_PROXY="http://127.0.0.1:1")
