# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Metrics compared with those recorded from kube-proxy 1.36: names, types, labels and buckets, mode by mode."""

from __future__ import annotations

import io
import json
import re
import time
import urllib.error
import urllib.request
from pathlib import Path

import prometheus_client
import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.agent.ports.health import ProxyHealth
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.ports.surface import Address, Surface
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.telemetry.log import LimitedLog, Log
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.telemetry.metric_tables import HTTP, PACKETS
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.telemetry.metrics import Metrics
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.threads.supervision import Supervisor
from ansible_collections.kubenode.proxy.plugins.module_utils.clients import ClientRule
from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.gate_table import GATES
from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.load import load
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.parameters.sysctls import SysctlsResource
from ansible_collections.kubenode.proxy.plugins.module_utils.packaging.identity import identity
from tests.parity.surface import later as later_facts

RECORDED = Path(__file__).parents[2] / "conformance" / "cases" / "health-and-metrics"
SERIES = re.compile(r"^(kubeproxy_\w+)(?:\{(.*)\})? \S+$", re.MULTILINE)
TYPE = re.compile(r"^# TYPE (kubeproxy_\w+) (\w+)$", re.MULTILINE)


def types(text):
    return dict(TYPE.findall(text))


def series(text):
    """Return every series: name and labels, the latter sorted and with numbers in one form."""
    found = set()
    for name, labels in SERIES.findall(text):
        pairs = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        if "le" in pairs:
            pairs["le"] = float(pairs["le"])
        found.add((name, tuple(sorted(pairs.items()))))
    return found


def observed(mode):
    """Return the metrics after the recorded events: one full sync of both families, each health check requested."""
    metrics = Metrics()
    if mode == "iptables":
        packets = {"ct_state_invalid_dropped_pkts": 0, "localhost_nps_accepted_pkts": 0, "others": 7}
        metrics.on_scrape(PACKETS, lambda: packets)
    for family in ("IPv4", "IPv6"):
        metrics.sync_duration.labels(family).observe(0.05)
        if mode != "ipvs":
            metrics.full_sync_duration.labels(family).observe(0.05)
        metrics.last_sync.labels(family).set_to_current_time()
        metrics.last_queued.labels(family).set_to_current_time()
        for policy in ("internal", "external"):
            metrics.no_local_endpoints.labels(policy, family).set(0)
        for table in ("filter", "nat") if mode == "iptables" else ():
            metrics.iptables_rules.labels(table, family).set(5)
            metrics.iptables_rules_last.labels(table, family).set(5)
    metrics.healthz.labels("200").inc()
    metrics.livez.labels("200").inc()
    return metrics.text().decode()


@pytest.mark.parametrize("mode", ["iptables", "ipvs", "nftables"])
def test_names_types_labels_and_buckets_are_those_of_kube_proxy(mode):
    recorded = (RECORDED / f"metrics-{mode}.txt").read_text()
    ours = observed(mode)
    assert types(ours) == types(recorded)
    assert series(ours) == series(recorded)


def test_series_without_events_are_not_shown():
    text = Metrics().text().decode()
    assert "restore_failures" not in text and "nftables_sync_failures" not in text
    assert "kubeproxy_sync_proxy_rules_service_changes_total 0.0" in text


def test_creation_times_are_never_shown():
    """prometheus_client before 0.17 always shows them; newer versions have an option."""
    prometheus_client.enable_created_metrics()
    try:
        metrics = Metrics()
        metrics.sync_duration.labels("IPv4").observe(0.1)
        metrics.healthz.labels("200").inc()
        metrics.observe_health("livez", True)
        for slis in (False, True):
            text = metrics.text(slis=slis).decode()
            assert "_created" not in text and "_total" in text
    finally:
        prometheus_client.disable_created_metrics()


def test_the_feature_gates_are_shown_as_kube_proxy_shows_them():
    metrics = Metrics()
    metrics.show_gates(load({}).configuration)
    pattern = re.compile(r"^(kubernetes_feature_enabled\{.*\}) (\S+)$", re.MULTILINE)
    recorded = {key: float(value) for key, value in pattern.findall((RECORDED / "metrics-nftables.txt").read_text())}
    shown = {key: float(value) for key, value in pattern.findall(metrics.text().decode())}
    assert len(shown) == len(GATES)
    later = {name for name in GATES if not any(f'"{name}"' in key for key in recorded)}
    assert later == set(later_facts()["gates"]), "those that kube-proxy 1.36 did not have"
    shown = {key: value for key, value in shown.items() if not any(f'"{name}"' in key for name in later)}
    assert shown.items() <= recorded.items()
    metrics.show_gates(load({"featureGates": {"ComponentFlagz": False}}).configuration)
    assert 'kubernetes_feature_enabled{name="ComponentFlagz",stage="BETA"} 0.0' in metrics.text().decode()


def test_own_counters_begin_at_0():
    metrics = Metrics()
    metrics.expect_repairs([SysctlsResource(())])
    metrics.on_scrape(HTTP, lambda: {"closed": {("evicted",): 0, ("deadline",): 3}})
    lines = metrics.text().decode().splitlines()
    assert 'kubenode_proxy_drift_repaired_total{ip_family="",kind="sysctls"} 0.0' in lines
    assert 'kubenode_proxy_http_connections_closed_total{reason="evicted"} 0.0' in lines
    assert 'kubenode_proxy_http_connections_closed_total{reason="deadline"} 3.0' in lines


def test_requests_to_the_api_server_are_counted():
    metrics = Metrics()
    metrics.observe_request("GET", "192.0.2.9:6443", "200", 0.01)
    metrics.observe_request("GET", "192.0.2.9:6443", "<error>", 30.0)
    metrics.observe_request("GET", "192.0.2.9:6443", "200", None)
    lines = metrics.text().decode().splitlines()
    assert 'rest_client_requests_total{code="200",host="192.0.2.9:6443",method="GET"} 2.0' in lines
    assert 'rest_client_requests_total{code="<error>",host="192.0.2.9:6443",method="GET"} 1.0' in lines
    name = "rest_client_request_duration_seconds"
    assert f'{name}_bucket{{host="192.0.2.9:6443",le="0.025",verb="GET"}} 1.0' in lines
    assert f'{name}_count{{host="192.0.2.9:6443",verb="GET"}} 2.0' in lines


def test_the_pages_of_the_metrics_address():
    metrics = Metrics()
    configuration = load({"featureGates": {"ComponentFlagz": False}}).configuration
    log = Log(io.StringIO())
    surface = Surface(
        configuration,
        ProxyHealth(60.0),
        metrics,
        LimitedLog(log),
        Supervisor(log),
        clients=ClientRule(),
        flags={"config": "/etc/c.yaml"},
        started=time.monotonic(),
    )
    listener = surface.listeners[1]
    listener.address = Address("127.0.0.1", 0)
    try:
        assert listener.open()
        port = listener.port
        assert fetch(port, "/healthz") == (200, "ok") == fetch(port, "/healthz/ping")
        assert fetch(port, "/proxyMode") == (200, configuration.mode)
        assert json.loads(fetch(port, "/configz")[1])["kubeproxy.config.k8s.io"]["kind"] == "KubeProxyConfiguration"
        assert json.loads(fetch(port, "/version")[1])["gitVersion"] == f"v{identity().text}"
        status, text = fetch(port, "/statusz?verbose")
        assert status == 200 and text.startswith("\nkube-proxy statusz\n") and "/flagz" not in text
        with pytest.raises(urllib.error.HTTPError, match="404"):
            fetch(port, "/flagz")
        surface.configure(load({}).configuration._replace(metrics_bind_address=f"127.0.0.1:{port}"))
        assert listener.open() and listener.port == port
        assert "config=/etc/c.yaml" in fetch(port, "/flagz")[1] and "/flagz" in fetch(port, "/statusz")[1]
        text = fetch(port, "/metrics")[1]
        assert f'kubenode_proxy_build_info{{engine="{identity().engine}",version="{identity().text}"}} 1.0' in text
        assert "kubenode_proxy_http_connections 1.0" in text
    finally:
        surface.close()


def fetch(port, path, method="GET"):
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", method=method)
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=30) as answer:
        return answer.status, answer.read().decode()


def test_service_levels_are_counted_and_reset():
    metrics = Metrics()
    log = Log(io.StringIO())
    surface = Surface(
        load({}).configuration,
        ProxyHealth(60.0),
        metrics,
        LimitedLog(log),
        Supervisor(log),
        clients=ClientRule(),
        started=time.monotonic(),
    )
    listener = surface.listeners[1]
    listener.address = Address("127.0.0.1", 0)
    try:
        assert listener.open()
        metrics.observe_health("livez", True)
        metrics.observe_health("livez", True)
        metrics.observe_health("healthz", False)
        port = listener.port
        status, text = fetch(port, "/metrics/slis")
        assert status == 200
        assert 'kubernetes_healthcheck{name="proxy",type="healthz"} 0.0' in text
        assert 'kubernetes_healthchecks_total{name="proxy",status="success",type="livez"} 2.0' in text
        assert fetch(port, "/metrics/slis", "DELETE") == (200, "metrics reset\n")
        assert fetch(port, "/metrics/slis") == (200, "")
        with pytest.raises(urllib.error.HTTPError, match="405"):
            fetch(port, "/metrics", "DELETE")
    finally:
        surface.close()
