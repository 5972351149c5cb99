# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Lists of files, what is merged from them, their sections and their syntax."""

from __future__ import annotations

import json
from typing import Any, Iterator

from .form import TLS, Form, document, one, text


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


def lists() -> Iterator[Form]:
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


def merges() -> Iterator[Form]:
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


def sections() -> Iterator[Form]:
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


def syntax() -> Iterator[Form]:
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
