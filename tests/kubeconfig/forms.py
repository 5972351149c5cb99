# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The forms of kubeconfigs that are tried: lists of files, syntax, servers, proxies, authorities and credentials.

In texts, ``@PORT@``, ``@DIR@``, ``@CA@`` and the like mean what a run has; see :mod:`.laboratory`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Dict, Iterator, List, Optional, Tuple

HTTP, TLS = "http://127.0.0.1:@PORT@", "https://127.0.0.1:@PORT@"
V1, V1BETA1 = "client.authentication.k8s.io/v1", "client.authentication.k8s.io/v1beta1"
_PLUGIN = """#!/bin/sh
token=x$1${2:+-$2}${GIVEN:+-$GIVEN}
version=${VERSION:-client.authentication.k8s.io/v1}
printf '{"apiVersion":"%s","kind":"ExecCredential","status":{"token":"%s"}}' "$version" "$token"
"""
_SHOWING_PLUGIN = """#!/usr/bin/env python3
import json, os, sys
given = json.loads(os.environ["KUBERNETES_EXEC_INFO"])
token = json.dumps(given, sort_keys=True).replace(" ", "")
print(json.dumps({"kind": "ExecCredential", "apiVersion": given["apiVersion"], "status": {"token": token}}))
"""
_CERTIFICATE_PLUGIN = """#!/bin/sh
cat @DIR@/credential.json
"""


@dataclass(frozen=True)
class Form:
    """One kubeconfig. ``files``: texts by path; one that ends in a slash is a directory, and one that begins with
    ``->`` a symbolic link. ``listed``: the value of KUBECONFIG, with ``explicit`` the only file, given as option.
    """

    name: str
    files: Dict[str, str]
    listed: Optional[str] = "@DIR@/config"
    explicit: bool = False
    context: str = ""
    environment: Dict[str, str] = field(default_factory=dict)
    unreadable: Tuple[str, ...] = ()
    folder: str = ""


def document(user: Any = None, cluster: Any = None, **others: Any) -> Dict[str, Any]:
    """Return a kubeconfig of one context."""
    secured = {"server": TLS, "certificate-authority-data": "@CA@"}
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
        "clusters": [{"name": "k", "cluster": secured if cluster is None else cluster}],
        "users": [{"name": "u", "user": {"token": "t"} if user is None else user}],
        **others,
    }


def one(
    name: str, user: Any = None, cluster: Any = None, files: Optional[Dict[str, str]] = None, /, **others: Any
) -> Form:
    """Return a form of one file."""
    environment = others.pop("environment", {})
    return Form(
        name, {"config": json.dumps(document(user, cluster, **others)), **(files or {})}, environment=environment
    )


def text(name: str, content: str) -> Form:
    """Return a form of one file with this text."""
    return Form(name, {"config": content})


def _part(server: str, name: str = "k", user: str = "u", token: str = "t", **others: Any) -> str:
    """Return a file that has a cluster, a user and a context, without a current one unless it is given."""
    return json.dumps(
        {
            "clusters": [{"name": name, "cluster": {"server": server, "certificate-authority-data": "@CA@"}}],
            "users": [{"name": user, "user": {"token": token}}],
            "contexts": [{"name": "c", "context": {"cluster": name, "user": user}}],
            **others,
        }
    )


def _lists() -> Iterator[Form]:
    good = json.dumps(document())
    other = _part(TLS + "/other", token="other", **{"current-context": "c"})
    a, b = {"a": good}, {"a": good, "b": other}
    yield Form("list: missing first", a, "@DIR@/none:@DIR@/a")
    yield Form("list: missing last", a, "@DIR@/a:@DIR@/none")
    yield Form("list: only missing", a, "@DIR@/none")
    yield Form("list: two missing", a, "@DIR@/none:@DIR@/none2")
    yield Form("list: missing directory", a, "@DIR@/none/config:@DIR@/a")
    yield Form("list: dangling link", {**a, "l": "->none"}, "@DIR@/l:@DIR@/a")
    yield Form("list: link to a file", {**a, "l": "->a"}, "@DIR@/l")
    yield Form("list: link to itself", {**a, "l": "->l"}, "@DIR@/l:@DIR@/a")
    yield Form("list: path through a file", a, "@DIR@/a/x:@DIR@/a")
    yield Form("list: empty entries", a, ":@DIR@/a::")
    yield Form("list: colon only", a, ":")
    yield Form("list: duplicate entries", b, "@DIR@/a:@DIR@/b:@DIR@/a")
    yield Form("list: first wins", b, "@DIR@/a:@DIR@/b")
    yield Form("list: first wins, reversed", b, "@DIR@/b:@DIR@/a")
    yield Form("list: directory first", {**a, "d/": ""}, "@DIR@/d:@DIR@/a")
    yield Form("list: directory last", {**a, "d/": ""}, "@DIR@/a:@DIR@/d")
    yield Form("list: unreadable first", b, "@DIR@/b:@DIR@/a", unreadable=("b",))
    yield Form("list: unreadable last", b, "@DIR@/a:@DIR@/b", unreadable=("b",))
    yield Form("list: broken last", {**a, "b": "{"}, "@DIR@/a:@DIR@/b")
    yield Form("list: empty file first", {**a, "b": ""}, "@DIR@/b:@DIR@/a")
    yield Form("list: only an empty file", {"b": ""}, "@DIR@/b")
    yield Form("list: blanks in the path", {"a b/config": good}, "@DIR@/a b/config")
    yield Form("list: blank beside an entry", a, " @DIR@/a")
    yield Form("list: relative path", {"sub/config": good}, "sub/config", folder="sub")
    yield Form("list: comma is no separator", b, "@DIR@/a,@DIR@/b")
    yield Form("explicit: one file", a, "@DIR@/a", explicit=True)
    yield Form("explicit: missing", a, "@DIR@/none", explicit=True)
    yield Form("explicit: directory", {"d/": ""}, "@DIR@/d", explicit=True)
    yield Form("default: in the home", {".kube/config": good}, None, environment={"HOME": "@DIR@"})
    yield Form("default: KUBECONFIG is empty", {".kube/config": good}, "", environment={"HOME": "@DIR@"})
    yield Form("default: none", {}, None, environment={"HOME": "@DIR@"})
    pod = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": "@PORT@"}
    yield Form("pod: KUBECONFIG wins", a, "@DIR@/a", environment=pod)
    yield Form("pod: the home wins", {".kube/config": good}, None, environment={"HOME": "@DIR@", **pod})
    yield Form("pod: no account", {}, None, environment={"HOME": "@DIR@", **pod})


def _merges() -> Iterator[Form]:
    cluster = json.dumps(
        {"clusters": [{"name": "k", "cluster": {"server": TLS, "certificate-authority-data": "@CA@"}}]}
    )
    user = json.dumps({"users": [{"name": "u", "user": {"token": "t"}}]})
    context = json.dumps(
        {"contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}], "current-context": "c"}
    )
    three = {"a": cluster, "b": user, "c": context}
    both = "@DIR@/a:@DIR@/b"
    yield Form("merge: one section in each file", three, "@DIR@/a:@DIR@/b:@DIR@/c")
    yield Form(
        "merge: current-context in the last", {"a": json.dumps(document(**{"current-context": ""})), "b": context}, both
    )
    yield Form(
        "merge: current-context of the first",
        {
            "a": json.dumps(document()),
            "b": _part(
                TLS,
                "k2",
                "u2",
                "t2",
                **{"current-context": "d", "contexts": [{"name": "d", "context": {"cluster": "k2", "user": "u2"}}]},
            ),
        },
        both,
    )
    yield Form(
        "merge: current-context that is missing",
        {"a": json.dumps(document(**{"current-context": "x"})), "b": context},
        both,
    )
    server_only = json.dumps({"clusters": [{"name": "k", "cluster": {"server": TLS}}]})
    yield Form("merge: fields of one cluster", {"a": server_only, "b": json.dumps(document())}, both)
    yield Form(
        "merge: fields of one cluster, reversed", {"a": server_only, "b": json.dumps(document())}, "@DIR@/b:@DIR@/a"
    )
    named = json.dumps({"clusters": [{"name": "k", "cluster": {"tls-server-name": "localhost"}}]})
    yield Form("merge: another field of one cluster", {"a": json.dumps(document()), "b": named}, both)
    yield Form(
        "merge: fields of one user",
        {"a": json.dumps({"users": [{"name": "u", "user": {"as": "jane"}}]}), "b": json.dumps(document())},
        both,
    )
    yield Form(
        "merge: fields of one user, reversed",
        {"a": json.dumps(document()), "b": json.dumps({"users": [{"name": "u", "user": {"as": "jane"}}]})},
        both,
    )
    yield Form(
        "merge: fields of one context",
        {"a": json.dumps({"contexts": [{"name": "c", "context": {"cluster": "k"}}]}), "b": json.dumps(document())},
        both,
    )
    yield Form(
        "merge: paths of each file",
        {
            "x/config": json.dumps(
                {"clusters": [{"name": "k", "cluster": {"server": TLS, "certificate-authority": "ca.pem"}}]}
            ),
            "x/ca.pem": "@CAPEM@",
            "y/token": "file",
            "y/config": json.dumps(document({"tokenFile": "token"})),
        },
        "@DIR@/x/config:@DIR@/y/config",
    )
    yield Form(
        "merge: named context", {"a": json.dumps(document(**{"current-context": "none"}))}, "@DIR@/a", context="c"
    )
    yield Form("merge: unknown named context", {"a": json.dumps(document())}, "@DIR@/a", context="d")


def _sections() -> Iterator[Form]:
    yield one("sections: no current-context", **{"current-context": ""})
    yield one("sections: current-context is null", **{"current-context": None})
    yield one("sections: current-context is a number", **{"current-context": 5})
    yield one("sections: unknown context", **{"current-context": "none"})
    yield one("sections: context without cluster", contexts=[{"name": "c", "context": {"user": "u"}}])
    yield one("sections: context without user", contexts=[{"name": "c", "context": {"cluster": "k"}}])
    yield one("sections: unknown user", contexts=[{"name": "c", "context": {"cluster": "k", "user": "x"}}])
    yield one("sections: unknown cluster", contexts=[{"name": "c", "context": {"cluster": "x", "user": "u"}}])
    yield one("sections: context is null", contexts=[{"name": "c", "context": None}])
    yield one(
        "sections: context with a wrong namespace",
        contexts=[{"name": "c", "context": {"cluster": "k", "user": "u", "namespace": "No_Name"}}],
    )
    yield one(
        "sections: context with a namespace",
        contexts=[{"name": "c", "context": {"cluster": "k", "user": "u", "namespace": "web"}}],
    )
    yield one("sections: users is null", users=None)
    yield one("sections: users is an object", users={"u": {"token": "t"}})
    yield one("sections: clusters is null", clusters=None)
    yield one("sections: item is null", users=[None, {"name": "u", "user": {"token": "t"}}])
    yield one("sections: item is text", users=["u"])
    yield one("sections: name is a number", users=[{"name": 5, "user": {"token": "t"}}])
    yield one(
        "sections: name is missing elsewhere", users=[{"user": {"token": "x"}}, {"name": "u", "user": {"token": "t"}}]
    )
    yield one("sections: user is null", users=[{"name": "u", "user": None}])
    yield one("sections: user is missing", users=[{"name": "u"}])
    yield one("sections: user is a list", users=[{"name": "u", "user": []}])
    yield one("sections: cluster is null", clusters=[{"name": "k", "cluster": None}])
    yield one(
        "sections: names are empty",
        clusters=[{"name": "", "cluster": {"server": TLS}}],
        contexts=[{"name": "c", "context": {"cluster": "", "user": "u"}}],
    )
    for section, entry in (
        ("users", {"user": {"token": "t2"}}),
        ("clusters", {"cluster": {"server": TLS + "/2"}}),
        ("contexts", {"context": {"cluster": "k", "user": "x"}}),
    ):
        name = document()[section][0]["name"]
        yield one(
            f"sections: the same name twice in {section}", **{section: [*document()[section], {"name": name, **entry}]}
        )
    yield one(
        "sections: the same name twice, elsewhere",
        users=[*document()["users"], {"name": "z", "user": {"token": "1"}}, {"name": "z", "user": {"token": "2"}}],
    )
    yield one("sections: a mistake in another user", users=[*document()["users"], {"name": "z", "user": {"token": 5}}])
    yield one(
        "sections: another user with two methods",
        users=[*document()["users"], {"name": "z", "user": {"token": "t", "username": "u"}}],
    )
    yield one("sections: extensions", extensions=[{"name": "e", "extension": {"a": 1}}], preferences={"colors": True})
    yield one("sections: extensions are an object", extensions={"a": 1})
    yield one("sections: preferences are null", preferences=None)
    yield one("sections: preferences are text", preferences="x")
    yield one("sections: unknown fields", {"token": "t", "unknown": {"a": 1}}, unknown=[1])
    yield one("sections: another kind", kind="Pod")
    yield one("sections: another version", apiVersion="v2")
    yield one("sections: kind and version are empty", kind="", apiVersion="")
    yield one("sections: kind is a number", kind=5)
    yield one(
        "sections: names with blanks",
        contexts=[{"name": "a b", "context": {"cluster": "k", "user": "u"}}],
        **{"current-context": "a b"},
    )
    yield one("sections: fields in capitals", {"Token": "t"})
    yield one("sections: sections in capitals", Users=[{"name": "u", "user": {"token": "t"}}], users=[])


_YAML = """apiVersion: v1
kind: Config
current-context: c
contexts:
- name: c
  context: {cluster: k, user: u}
clusters:
- name: k
  cluster:
    server: https://127.0.0.1:@PORT@
    certificate-authority-data: @CA@
users:
- name: u
  user:
    token: t
"""


def _syntax() -> Iterator[Form]:
    yield text("syntax: YAML", _YAML)
    yield text("syntax: CRLF", _YAML.replace("\n", "\r\n"))
    yield text("syntax: byte order mark, YAML", "\ufeff" + _YAML)
    yield text("syntax: byte order mark, JSON", "\ufeff" + json.dumps(document()))
    yield text("syntax: tabs in JSON", json.dumps(document(), indent="\t"))
    yield text("syntax: tab as indentation", _YAML.replace("    token", "\ttoken"))
    yield text("syntax: tab after a colon", _YAML.replace("token: t", "token:\tt"))
    yield text("syntax: document markers", f"---\n{_YAML}...\n")
    yield text("syntax: two documents", f"{_YAML}---\n{_YAML.replace('token: t', 'token: second')}")
    yield text("syntax: empty first document", f"---\n---\n{_YAML}")
    yield text("syntax: comment first", f"# a comment\n\n{_YAML}")
    yield text("syntax: comments only", "# a comment\n")
    yield text("syntax: null", "null\n")
    yield text("syntax: a list", "[]")
    yield text("syntax: a word", "config")
    yield text("syntax: a number", "5")
    yield text("syntax: zero bytes", "\0\0")
    yield text("syntax: empty object", "{}")
    yield text(
        "syntax: anchors", _YAML.replace("token: t", "token: &x t\n    username: ''\n- name: v\n  user: {token: *x}")
    )
    yield text(
        "syntax: alias of a mapping",
        _YAML.replace("user:\n    token: t", "user: &x\n    token: t\n- name: v\n  user: *x"),
    )
    yield text(
        "syntax: merge key",
        _YAML.replace("user:\n    token: t", "user: &x\n    token: t\n- name: v\n  user:\n    <<: *x").replace(
            "user: u}", "user: v}"
        ),
    )
    yield text("syntax: unknown alias", _YAML.replace("token: t", "token: *none"))
    yield text("syntax: key twice", _YAML + "    token: second\n")
    yield text(
        "syntax: key twice in JSON", json.dumps(document()).replace('"token": "t"', '"token": "t", "token": "second"')
    )
    yield text("syntax: section twice", _YAML + "users:\n- name: u\n  user: {token: second}\n")
    yield text("syntax: unquoted number", _YAML.replace("token: t", "token: 12345"))
    yield text("syntax: unquoted true", _YAML.replace("token: t", "token: true"))
    yield text("syntax: unquoted yes", _YAML.replace("token: t", "token: yes"))
    yield text("syntax: unquoted date", _YAML.replace("token: t", "token: 2024-01-01"))
    yield text("syntax: unquoted octal name", _YAML.replace("name: u", "name: 0777").replace("user: u", "user: 0777"))
    yield text("syntax: empty value", _YAML.replace("token: t", "token:\n    tokenFile:"))
    yield text("syntax: tilde is null", _YAML.replace("token: t", "token: ~"))
    yield text("syntax: number as key", _YAML + "5: x\n")
    yield text("syntax: tag", _YAML.replace("token: t", "token: !!str 12345"))
    yield text("syntax: tag of a program", _YAML.replace("token: t", "token: !x t"))
    yield text("syntax: binary", _YAML.replace("token: t", "token: !!binary dA=="))
    yield text("syntax: folded text", _YAML.replace("token: t", "token: >-\n      t"))
    yield text("syntax: block with its newline", _YAML.replace("token: t", "token: |\n      t"))
    yield text("syntax: trailing comma", json.dumps(document())[:-1] + ",}")
    yield text("syntax: text after JSON", json.dumps(document()) + " x")
    yield text("syntax: two JSON objects", json.dumps(document()) + "\n" + json.dumps(document({"token": "second"})))
    yield text("syntax: JSON comment", "// x\n" + json.dumps(document()))
    yield text("syntax: flag as text", _YAML.replace("    server", '    insecure-skip-tls-verify: "true"\n    server'))
    yield text("syntax: flag as number", _YAML.replace("    server", "    insecure-skip-tls-verify: 1\n    server"))
    yield text("syntax: flag is null", _YAML.replace("    server", "    insecure-skip-tls-verify: null\n    server"))
    yield text("syntax: flag on", _YAML.replace("    server", "    disable-compression: on\n    server"))


def _servers() -> Iterator[Form]:
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


def _trust() -> Iterator[Form]:
    files = {"ca.pem": "@CAPEM@"}

    def trust(name: str, **cluster: Any) -> Form:
        return one(
            f"trust: {name}",
            None,
            {"server": TLS, **{key.replace("_", "-"): value for key, value in cluster.items()}},
            files,
        )

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


def _proxies() -> Iterator[Form]:
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


def _users() -> Iterator[Form]:
    files = {"token": "file\n", "empty": "", "c.crt": "@CERTPEM@", "c.key": "@KEYPEM@"}

    def user(name: str, **fields: Any) -> Form:
        return one(f"user: {name}", {key.replace("_", "-"): value for key, value in fields.items()}, None, files)

    yield user("no credentials")
    yield user("token", token="t")
    yield user("token with a blank", token="a b")
    yield user("token with a newline", token="t\n")
    yield user("token beyond ASCII", token="tä")
    yield user("token is empty", token="")
    yield user("token file", tokenFile="token")
    yield user("token and file", token="t", tokenFile="token")
    yield user("token and missing file", token="t", tokenFile="none")
    yield user("missing token file", tokenFile="none")
    yield user("empty token file", tokenFile="empty")
    yield user("name and password", username="u", password="p")
    yield user("name only", username="u")
    yield user("password only", password="p")
    yield user("password with a colon", username="u", password="a:b")
    yield user("name beyond ASCII", username="ü", password="p")
    yield user("token and password", token="t", username="u", password="p")
    yield user("token file and password", tokenFile="token", username="u", password="p")
    yield user("password and certificate", username="u", password="p", client_certificate="c.crt", client_key="c.key")
    yield user("certificate files", client_certificate="c.crt", client_key="c.key")
    yield user("certificate data", client_certificate_data="@CERT@", client_key_data="@KEY@")
    yield user("certificate file, key data", client_certificate="c.crt", client_key_data="@KEY@")
    yield user("certificate data, key file", client_certificate_data="@CERT@", client_key="c.key")
    yield user(
        "certificate data and file", client_certificate="c.crt", client_certificate_data="@CERT@", client_key="c.key"
    )
    yield user("key data and file", client_certificate="c.crt", client_key_data="@KEY@", client_key="c.key")
    yield user("certificate without key", client_certificate="c.crt")
    yield user("key without certificate", client_key="c.key")
    yield user("key without certificate, token", client_key="c.key", token="t")
    yield user("missing certificate file", client_certificate="none", client_key="c.key")
    yield user("certificate and token", client_certificate="c.crt", client_key="c.key", token="t")
    yield user("certificate and key exchanged", client_certificate="c.key", client_key="c.crt")
    yield user("certificate that is none", client_certificate_data="AAAA", client_key_data="AAAA")
    yield user("certificate and key in one", client_certificate_data="@PAIR@", client_key_data="@PAIR@")
    yield user("as", token="t", **{"as": "jane"})
    yield user(
        "as with everything",
        token="t",
        **{
            "as": "jane",
            "as-uid": "7",
            "as-groups": ["a", "b"],
            "as-user-extra": {"reason": ["x", "y"], "Example.com/Key%": ["z"]},
        },
    )
    yield user("as beyond ASCII", token="t", **{"as": "jäne"})
    yield user("groups without as", token="t", **{"as-groups": ["a"]})
    yield user("uid without as", token="t", **{"as-uid": "7"})
    yield user("extra without as", token="t", **{"as-user-extra": {"a": ["b"]}})
    yield user("groups are text", token="t", **{"as": "jane", "as-groups": "a"})
    yield user("extra is a list", token="t", **{"as": "jane", "as-user-extra": ["a"]})
    yield user("as only", **{"as": "jane"})
    yield user("unknown auth-provider", **{"auth-provider": {"name": "none"}})
    yield user("removed auth-provider", **{"auth-provider": {"name": "gcp", "config": {}}})
    yield user("auth-provider and token", token="t", **{"auth-provider": {"name": "none"}})
    yield user("extensions", token="t", extensions=[{"name": "e", "extension": {}}])


def _plugins() -> Iterator[Form]:
    never = {"apiVersion": V1, "command": "@DIR@/plugin", "interactiveMode": "Never"}
    credential = {
        "apiVersion": V1,
        "kind": "ExecCredential",
        "status": {"clientCertificateData": "@CERTPEM@", "clientKeyData": "@KEYPEM@"},
    }
    files = {
        "plugin": _PLUGIN,
        "certificate": _CERTIFICATE_PLUGIN,
        "fail": "#!/bin/sh\necho no network >&2\nexit 3\n",
        "show": _SHOWING_PLUGIN,
        "ca.pem": "@CAPEM@",
        "garbage": "#!/bin/sh\necho garbage\n",
        "credential.json": json.dumps(credential),
    }

    def plugin(name: str, settings: Any, environment: Optional[Dict[str, str]] = None, **others: Any) -> Form:
        return one(f"exec: {name}", {"exec": settings, **others}, None, files, environment=environment or {})

    yield plugin("v1", never)
    yield plugin(
        "v1beta1", {"apiVersion": V1BETA1, "command": "@DIR@/plugin", "env": [{"name": "VERSION", "value": V1BETA1}]}
    )
    yield plugin("v1beta1, never", {**never, "apiVersion": V1BETA1, "env": [{"name": "VERSION", "value": V1BETA1}]})
    yield plugin(
        "v1alpha1",
        {
            **never,
            "apiVersion": "client.authentication.k8s.io/v1alpha1",
            "env": [{"name": "VERSION", "value": "client.authentication.k8s.io/v1alpha1"}],
        },
    )
    yield plugin("another version in the answer", {**never, "apiVersion": V1BETA1})
    yield plugin("without a version", {k: v for k, v in never.items() if k != "apiVersion"})
    yield plugin("unknown version", {**never, "apiVersion": "x/v1"})
    yield plugin("v1 without a mode", {k: v for k, v in never.items() if k != "interactiveMode"})
    yield plugin("if available", {**never, "interactiveMode": "IfAvailable"})
    yield plugin("always", {**never, "interactiveMode": "Always"})
    yield plugin("unknown mode", {**never, "interactiveMode": "never"})
    yield plugin("arguments", {**never, "args": ["a", "b c"]})
    yield plugin("arguments are null", {**never, "args": None})
    yield plugin("arguments are text", {**never, "args": "a"})
    yield plugin("argument is a number", {**never, "args": [5]})
    yield plugin("environment", {**never, "env": [{"name": "GIVEN", "value": "v"}]})
    yield plugin("environment replaces", {**never, "env": [{"name": "GIVEN", "value": "v"}]}, {"GIVEN": "w"})
    yield plugin("environment is kept", never, {"GIVEN": "w"})
    yield plugin("environment is null", {**never, "env": None})
    yield plugin("environment is an object", {**never, "env": {"GIVEN": "v"}})
    yield plugin("environment without a name", {**never, "env": [{"value": "v"}]})
    yield plugin("environment with an empty name", {**never, "env": [{"name": "", "value": "v"}]})
    yield plugin("environment without a value", {**never, "env": [{"name": "GIVEN"}]}, {"GIVEN": "w"})
    yield plugin("environment with a number", {**never, "env": [{"name": "GIVEN", "value": 5}]})
    yield plugin("relative command", {**never, "command": "./plugin"})
    yield plugin("command of PATH", {**never, "command": "plugin"}, {"PATH": "@DIR@:/usr/bin:/bin"})
    yield plugin("missing command", {**never, "command": "none", "installHint": "install it"})
    yield plugin("empty command", {**never, "command": ""})
    yield plugin("failing", {**never, "command": "@DIR@/fail"})
    yield plugin("garbage", {**never, "command": "@DIR@/garbage"})
    yield plugin("certificate", {**never, "command": "@DIR@/certificate"})
    given = {**never, "command": "@DIR@/show"}
    yield plugin("what it gets", given)
    yield plugin("what it gets, if available", {**given, "interactiveMode": "IfAvailable"})
    yield plugin("cluster information", {**given, "provideClusterInfo": True})
    everything = {
        "certificate-authority": "ca.pem",
        "tls-server-name": "localhost",
        "proxy-url": "http://127.0.0.1:@PORT@",
        "disable-compression": True,
        "server": TLS + "/a/",
        "extensions": [{"name": "client.authentication.k8s.io/exec", "extension": {"audience": "x"}}],
    }
    yield one("exec: all cluster information", {"exec": {**given, "provideClusterInfo": True}}, everything, files)
    yield one(
        "exec: cluster information, insecure",
        {"exec": {**given, "provideClusterInfo": True}},
        {"server": TLS, "insecure-skip-tls-verify": True},
        files,
    )
    yield one("exec: over http", {"exec": {**never, "command": "@DIR@/fail"}}, {"server": HTTP}, files)
    yield plugin("cluster information is text", {**never, "provideClusterInfo": "yes"})
    yield plugin("installation hint is a number", {**never, "installHint": 5})
    yield plugin("and a token", never, None, token="t")
    yield plugin("and a password", never, None, username="u", password="p")
    yield plugin("and an auth-provider", never, None, **{"auth-provider": {"name": "none"}})
    yield plugin("and as", never, None, **{"as": "jane"})
    yield plugin(
        "and a client certificate", never, None, **{"client-certificate-data": "@CERT@", "client-key-data": "@KEY@"}
    )
    yield plugin("is null", None, None, token="t")
    yield plugin("is text", "plugin")


def forms() -> List[Form]:
    """Return all forms."""
    groups = (_lists, _merges, _sections, _syntax, _servers, _trust, _proxies, _users, _plugins)
    return [form for group in groups for form in group()]
