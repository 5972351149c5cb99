# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Reflectors renew credentials that expire or are revoked, at the cost of one request at most."""

from __future__ import annotations

import datetime
import json
import subprocess

from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.api import client as api
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.api.access.exec_plugin import (
    ExecPlugin,
    ExecSettings,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.api.connection import Access
from tests.apiserver.wire import Answer, failure
from tests.unit.agent.scripted_reflector import HOST, Run, bookmark, events, page, service


def test_credentials_that_expire_each_hour_are_renewed_for_half_a_day(monkeypatch):
    """A plugin's tokens live an hour, and only the latest is valid: no answer is 401, no list repeated."""

    def plugin(words, **options):
        issued.append(clock.now)
        expiry = datetime.datetime.fromtimestamp(clock.now + 3600, datetime.timezone.utc)
        status = {"token": f"token-{len(issued)}", "expirationTimestamp": expiry.strftime("%Y-%m-%dT%H:%M:%SZ")}
        credential = {"kind": "ExecCredential", "apiVersion": "client.authentication.k8s.io/v1", "status": status}
        return subprocess.CompletedProcess(words, 0, json.dumps(credential).encode(), b"")

    def valid():
        return f"Bearer token-{len(issued)}".encode() in run.wire.sent and clock.now < issued[-1] + 3600

    issued = []
    run = Run(
        lambda query: page([service("a")]) if valid() else failure(401, "Unauthorized"),
        lambda query: (
            Answer(*events(bookmark("10"))[:-1], float(query["timeoutSeconds"]), b"0\r\n\r\n")
            if valid()
            else failure(401, "Unauthorized")
        ),
    )
    clock = run.clock
    credentials = ExecPlugin(ExecSettings("client.authentication.k8s.io/v1", "plugin"), now=clock, run=plugin)
    monkeypatch.setattr(api, "resolve", lambda connection: Access(HOST, credentials))
    run.go(12 * 3600.0)
    assert 11 <= len(issued) <= 12 and len(run.lists) == 1 and len(run.watches) > 72
    assert run.log == ""


def test_a_revoked_token_fails_one_request_and_is_replaced_by_the_renewed_one(monkeypatch):
    """Without an expiry the server's 401 is the only sign; it makes the plugin run again."""
    issued, good = [], [1]

    def plugin(words, **options):
        issued.append(clock.now)
        credential = {"kind": "ExecCredential", "apiVersion": "client.authentication.k8s.io/v1"}
        credential["status"] = {"token": f"token-{len(issued)}"}
        return subprocess.CompletedProcess(words, 0, json.dumps(credential).encode(), b"")

    def watch(query):
        if f"Bearer token-{good[0]}".encode() not in run.wire.sent:
            return failure(401, "Unauthorized")
        if len(run.watches) == 5:
            good[0] = 2
        return Answer(*events(bookmark("10"))[:-1], float(query["timeoutSeconds"]), b"0\r\n\r\n")

    run = Run(lambda query: page([service("a")]), watch)
    clock = run.clock
    credentials = ExecPlugin(ExecSettings("client.authentication.k8s.io/v1", "plugin"), now=clock, run=plugin)
    monkeypatch.setattr(api, "resolve", lambda connection: Access(HOST, credentials))
    run.go(2 * 3600.0)
    assert len(issued) == 2 and len(run.lists) == 1
    lines = run.log.splitlines()
    assert len(lines) == 2 and "credentials are not accepted" in lines[0] and "can be read again" in lines[1]
