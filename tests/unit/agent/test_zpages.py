# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The pages /statusz, /flagz and /version compared with the formats of kube-proxy 1.36."""

from __future__ import annotations

import json
import re

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.agent.ports.zpages import (
    FLAGZ,
    STATUSZ,
    flagz,
    negotiated,
    statusz,
    version_response,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.settings import AgentOptions, command_line_flags
from ansible_collections.kubenode.proxy.plugins.module_utils.packaging.identity import Identity

IDENTITY = Identity("1.2.3", "658f7d18e1be" + "0" * 52)
STARTED = 1729112623.7
PATHS = ["/metrics", "/metrics/slis", "/statusz", "/configz"]
JSON = "application/json;v={};g=config.k8s.io;as={}"
WARNING = (
    "Warning: This endpoint is not meant to be machine parseable, has no formatting compatibility guarantees and is "
    "for debugging purposes only."
)


def test_statusz_as_text():
    answer = statusz("", IDENTITY, STARTED, PATHS, STARTED + 4 * 3600 + 5 * 60 + 6.5)
    assert (answer.code, answer.headers) == (200, (("Content-Type", "text/plain; charset=utf-8"),))
    lines = answer.body.decode().split("\n")
    assert lines[:4] == ["", "kube-proxy statusz", WARNING, ""]
    assert lines[4:6] == ["Started: Wed Oct 16 21:03:43 UTC 2024", "Up: 4 hr 05 min 06 sec"]
    assert re.fullmatch(r"Go version: none \(Python 3\.[\w.+]+\)", lines[6])
    assert lines[7:] == [
        "Binary version: 1.2.3+658f7d18e1be",
        "Emulation version: 1.38",
        "Paths: /configz /metrics /statusz",
        "",
    ]


def test_days_are_padded_with_a_blank():
    assert b"Started: Thu Jan  1 00:00:01 UTC 1970" in statusz("", IDENTITY, 1.0, PATHS, 0.0).body


@pytest.mark.parametrize("version", ["v1beta1", "v1alpha1"])
def test_statusz_as_json(version):
    answer = statusz(JSON.format(version, STATUSZ), IDENTITY, STARTED, PATHS, STARTED + 856.0)
    headers = dict(answer.headers)
    assert answer.code == 200 and headers["Content-Type"] == "application/json"
    assert ("Warning" in headers) == (version == "v1alpha1")
    document = json.loads(answer.body)
    assert document.pop("goVersion").startswith("none (Python 3.")
    assert document == {
        "kind": "Statusz",
        "apiVersion": f"config.k8s.io/{version}",
        "metadata": {"name": "kube-proxy"},
        "startTime": "2024-10-16T21:03:43Z",
        "uptimeSeconds": 856,
        "binaryVersion": "1.2.3+658f7d18e1be",
        "emulationVersion": "1.38",
        "paths": ["/configz", "/metrics", "/statusz"],
    }


def test_flagz_shows_the_command_line():
    flags = command_line_flags(AgentOptions(configuration="/etc/c.yaml", ignore_findings=("a", "b"), node_name="n1"))
    lines = flagz("text/plain", flags).body.decode().split("\n")
    assert lines[:4] == ["", "kube-proxy flagz", WARNING, ""]
    assert lines[4:] == [*sorted(lines[4:-1]), ""]
    assert {"config=/etc/c.yaml", "ignore=a,b", "node-name=n1", "kubeconfig="} <= set(lines)
    document = json.loads(flagz(JSON.format("v1beta1", FLAGZ), flags).body)
    assert document["kind"] == "Flagz" and document["flags"] == flags


def test_version():
    document = json.loads(version_response(IDENTITY).body)
    assert document["gitVersion"] == "v1.2.3+658f7d18e1be" and document["gitCommit"] == IDENTITY.engine
    assert (document["major"], document["minor"], document["emulationMinor"]) == ("1", "2", "38")
    assert document["platform"].startswith("linux/")


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        ("", ""),
        ("*/*", ""),
        ("text/*;q=0.5", ""),
        ("text/html, text/plain", ""),
        (JSON.format("v1beta1", STATUSZ), "v1beta1"),
        (f"text/html, {JSON.format('v1alpha1', STATUSZ)}", "v1alpha1"),
        (JSON.format("v1beta1", STATUSZ).replace(";", "; "), "v1beta1"),
        ("application/json", None),
        (JSON.format("v1", STATUSZ), None),
        (JSON.format("v1beta1", FLAGZ), None),
        ("text/html", None),
    ],
)
def test_the_accept_header_chooses_the_form(accept, expected):
    assert negotiated(accept, STATUSZ) == expected
    if expected is None:
        assert statusz(accept, IDENTITY, STARTED, PATHS, STARTED).code == 406
