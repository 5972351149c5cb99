# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Credentials of users, and plug-ins that give some."""

from __future__ import annotations

import json
from typing import Any, Iterator, Optional

from .form import HTTP, TLS, Form, dashed, one

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


def users() -> Iterator[Form]:
    files = {"token": "file\n", "empty": "", "c.crt": "@CERTPEM@", "c.key": "@KEYPEM@"}

    def user(name: str, **fields: Any) -> Form:
        return one(f"user: {name}", dashed(fields), None, files)

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


def plugins() -> Iterator[Form]:
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

    def plugin(name: str, settings: Any, environment: Optional[dict[str, str]] = None, **others: Any) -> Form:
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
