# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The health check requested by a Service's annotations, and invalid annotations by name."""

from __future__ import annotations

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.model import HealthCheck, NamespacedName
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.parsing.prune import prune
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.state import ClusterState

KEY = NamespacedName("shop", "web")


def service(**annotations):
    named = {f"kubenode.proxy/check{'-' if name else ''}{name}": value for name, value in annotations.items()}
    named = {name.replace("_", "-"): value for name, value in named.items()}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"namespace": "shop", "name": "web", "annotations": {**named, "other/annotation": "x"}},
        "spec": {"clusterIP": "10.96.0.1", "ports": [{"port": 80}]},
    }


def parsed(**annotations):
    state = ClusterState.from_objects([service(**annotations)])
    assert state.refusals == ()
    return state.services[KEY].check, [str(part) for part in state.skipped]


def test_defaults_and_all_settings():
    assert parsed() == (None, [])
    assert parsed(path="/ignored-without-a-check") == (None, [])
    assert parsed(**{"": "tcp"}) == (HealthCheck(), [])
    every = {
        "": "https",
        "port": "8443",
        "path": "/readyz?verbose",
        "status": "200-299, 401",
        "server_name": "kubernetes.default.svc",
        "ca": "/etc/kubernetes/pki/ca.crt",
        "interval": "500ms",
        "fast_interval": "100ms",
        "timeout": "2s",
        "fall": "3",
        "rise": "1",
    }
    expected = HealthCheck(
        scheme="https",
        port=8443,
        path="/readyz?verbose",
        statuses=((200, 299), (401, 401)),
        server_name="kubernetes.default.svc",
        ca="/etc/kubernetes/pki/ca.crt",
        interval=0.5,
        timeout=2.0,
        fall=3,
        rise=1,
        fast_interval=0.1,
    )
    assert parsed(**every) == (expected, [])


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("", "icmp", '"icmp" is not one of tcp, http, https'),
        ("port", "70000", '"70000" is not a number between 1 and 65535'),
        ("port", "http", '"http" is not a number between 1 and 65535'),
        ("path", "readyz", '"readyz" is not a path of printable ASCII that begins with /'),
        ("path", "/a\r\nHost: x", '"/a\\r\\nHost: x" is not a path of printable ASCII that begins with /'),
        ("status", "299-200", '"299-200" is not a list of HTTP statuses such as 200-299,401'),
        ("status", "ok", '"ok" is not a list of HTTP statuses such as 200-299,401'),
        ("server_name", "a b", '"a b" is not a DNS name'),
        ("server_name", "a" * 64, f'"{"a" * 59}... is not a DNS name'),
        ("ca", "/ca\0.crt", '"/ca\\u0000.crt" is not an absolute path'),
        ("ca", "/ca\ud800.crt", '"/ca\\ud800.crt" is not an absolute path'),
        ("ca", "ca.crt", '"ca.crt" is not an absolute path'),
        ("interval", "1", '"1" is not a duration such as 500ms or 2s, from 100ms to 60m'),
        ("fast_interval", "0s", '"0s" is not a duration such as 500ms or 2s, from 100ms to 60m'),
        ("timeout", "10ms", '"10ms" is not a duration such as 500ms or 2s, from 100ms to 60m'),
        ("fall", "0", '"0" is not a number between 1 and 100'),
        ("rise", 3, "3 is not a string"),
    ],
)
def test_an_invalid_annotation_is_named_and_the_service_is_served(name, value, reason):
    check, (line,) = parsed(**{"": "http", name: value})
    full = f"kubenode.proxy/check{'-' if name else ''}{name.replace('_', '-')}"
    assert check is None
    assert line == f"Service shop/web: metadata.annotations[{full}]: {reason}"


def test_a_duration_is_written_as_in_the_configuration():
    (check, skipped), (longest, none) = (
        parsed(**{"": "tcp", "interval": "1m30s"}),
        parsed(**{"": "tcp", "interval": "1h"}),
    )
    assert (check.interval, longest.interval) == (90.0, 3600.0) and skipped == none == []


def test_snapshots_keep_these_annotations_only():
    pruned = prune(service(**{"": "tcp"}))
    assert pruned["metadata"]["annotations"] == {"kubenode.proxy/check": "tcp"}
