# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Each candidate of ``auto``: the first mode that the node can run, and userspace only if an agent forwards."""

from __future__ import annotations

from typing import Any

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import PreflightError
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.files.static import parse_static
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.state import ClusterState
from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.load import load
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.modes import choose
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.modes.mode import Mode
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.modes.registry import (
    FILTER_BACKENDS,
    ipvs_with,
    mode_object,
    with_listeners,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.request import Request
from ansible_collections.kubenode.proxy.plugins.module_utils.preflight.findings import ERROR, MODULES, Finding

ALL = {"nftables", "ipvs", "iptables"}


def request(mode: str = "auto", **more: Any) -> Request:
    return Request(ClusterState(), load({}).configuration, mode=mode, **more)


def lacking_where(lacking: bool, name: str) -> list[Finding]:
    return [Finding(MODULES, ERROR, f"no {name} here", "")] if lacking else []


@pytest.fixture
def impossible(monkeypatch) -> set[str]:
    """Provide the modes that the node cannot run."""
    found: set[str] = set()
    monkeypatch.setattr(choose, "capabilities", lambda: (1 << 41) - 1)
    monkeypatch.setattr(choose, "_findings", lambda mode, _schedulers: lacking_where(mode.name in found, mode.name))
    monkeypatch.setattr(choose, "_errors", lambda findings, _ignored: [item.what for item in findings])
    monkeypatch.setattr(choose, "_serving_filter_backend", lambda: None)
    monkeypatch.setattr(Mode, "unsupported_reasons", lambda _mode, _families: [])
    for mode in (*map(mode_object, choose._PREFERRED), *map(ipvs_with, FILTER_BACKENDS)):
        monkeypatch.setattr(type(mode), "unsupported_reasons", lambda _mode, _families: [])
    return found


@pytest.mark.parametrize(
    ("missing", "chosen"),
    [
        ((), "nftables"),
        (("nftables",), "ipvs"),
        (("nftables", "ipvs"), "iptables"),
        (("nftables", "ipvs", "iptables"), "userspace"),
        (("ipvs", "iptables"), "nftables"),
        (("nftables", "iptables"), "ipvs"),
    ],
)
def test_the_agent_uses_the_first_possible_mode(impossible, missing, chosen):
    impossible.update(missing)
    found = choose.choose_mode(request(agent=True))
    assert found.mode.name == chosen
    for name in ALL & set(missing) if chosen in ("iptables", "userspace") else ():
        assert f"{name} mode is not possible: no {name} here" in found.reason
    cautions = [text for text in found.warnings if "endpoints see the address of this node" in text]
    assert bool(cautions) is (chosen == "userspace")


def test_one_shot_auto_refuses_with_the_reasons(impossible):
    impossible.update(ALL)
    with pytest.raises(PreflightError, match=r"no nftables here.*no ipvs here.*no iptables here.*needs the agent"):
        choose.choose_mode(request())


def test_a_check_follows_the_agent_that_runs(impossible, tmp_path):
    impossible.update(ALL)
    with pytest.raises(PreflightError, match="needs the agent"):
        choose.choose_mode(request(check=True, state_directory=str(tmp_path)))
    (tmp_path / "agent").mkdir()
    (tmp_path / "agent" / "agent.sock").touch()
    assert choose.choose_mode(request(check=True, state_directory=str(tmp_path))).mode.name == "userspace"


def test_auto_without_privileges_names_them(impossible, monkeypatch):
    monkeypatch.setattr(choose, "capabilities", lambda: 0)
    with pytest.raises(PreflightError, match="lacks CAP_NET_ADMIN"):
        choose.choose_mode(request(agent=True))


def test_explicit_userspace_needs_the_agent(impossible):
    with pytest.raises(PreflightError, match="userspace mode needs the agent"):
        choose.choose_mode(request("userspace"))
    found = choose.choose_mode(request("userspace", agent=True))
    assert (found.mode.name, found.reason) == ("userspace", "requested")
    assert found.warnings == (found.mode.caution,)


@pytest.mark.parametrize(("mode", "warned"), [("userspace", True), ("nftables", False)])
def test_policies_that_a_mode_bypasses_are_named(impossible, mode, warned):
    asked = request(mode, agent=True)
    node_proxy = asked.configuration.node_proxy
    policies = node_proxy.network_policy._replace(enabled=True)
    configuration = asked.configuration._replace(node_proxy=node_proxy._replace(network_policy=policies))
    found = choose.choose_mode(asked._replace(configuration=configuration))
    assert [text for text in found.warnings if "networkPolicy" in text] == [found.mode.policy_caution] * warned
    assert bool(found.mode.policy_caution) is warned


IPTABLES, NFTABLES = ipvs_with("iptables"), ipvs_with("nftables")


@pytest.mark.parametrize(
    ("wanted", "serving", "lacking", "filter_backend", "reason"),
    [
        ("auto", None, (), "nftables", "filter backend nftables: this node meets its requirements"),
        ("auto", None, ("iptables",), "nftables", "filter backend nftables: this node meets its requirements"),
        (
            "auto",
            None,
            ("nftables",),
            "iptables",
            "filter backend iptables: this node meets its requirements; "
            "filter backend nftables is not possible: no nftables here",
        ),
        (
            "auto",
            None,
            ("iptables", "nftables"),
            "iptables",
            "filter backend nftables is not possible: no nftables here; "
            "filter backend iptables is not possible: no iptables here",
        ),
        ("auto", NFTABLES, (), "nftables", "filter backend nftables: already in use on this node"),
        ("auto", IPTABLES, ("iptables",), "iptables", "filter backend iptables: already in use on this node"),
        ("nftables", IPTABLES, ("nftables",), "nftables", "filter backend nftables: set in the configuration"),
        ("iptables", NFTABLES, (), "iptables", "filter backend iptables: set in the configuration"),
    ],
)
def test_filter_backend_of_ipvs_mode(impossible, monkeypatch, wanted, serving, lacking, filter_backend, reason):
    monkeypatch.setattr(choose, "_serving_filter_backend", lambda: serving)
    monkeypatch.setattr(
        choose,
        "_findings",
        lambda mode, _schedulers: lacking_where(mode.filter_backend in lacking, mode.filter_backend),
    )
    asked = request("ipvs")
    node_proxy = asked.configuration.node_proxy._replace(ipvs_filter_backend=wanted)
    found = choose.choose_mode(asked._replace(configuration=asked.configuration._replace(node_proxy=node_proxy)))
    assert (found.mode.name, found.mode.filter_backend) == ("ipvs", filter_backend)
    assert found.reason.startswith(f"requested; {reason}")


def test_a_filter_backend_is_rendered_without_a_node():
    asked = request("ipvs")
    for wanted, filter_backend in (("auto", "iptables"), ("iptables", "iptables"), ("nftables", "nftables")):
        node_proxy = asked.configuration.node_proxy._replace(ipvs_filter_backend=wanted)
        configuration = asked.configuration._replace(node_proxy=node_proxy)
        assert choose.mode_without_node(asked._replace(configuration=configuration)).filter_backend == filter_backend


def with_static(**annotations: str) -> ClusterState:
    """Return a cluster state with one static Service that has these annotations."""
    manifest = {
        "kind": "Service",
        "apiVersion": "v1",
        "metadata": {"name": "apiserver", "annotations": annotations},
        "spec": {"clusterIP": "10.103.97.2", "ports": [{"port": 6443}]},
    }
    state = ClusterState()
    state.set_static(parse_static({"a.json": [manifest]}))
    return state


@pytest.mark.parametrize(
    ("mode", "fields", "listens"),
    [
        ("nftables", {"nodePortAddresses": ["primary", "localhost"]}, True),
        ("nftables", {"nodePortAddresses": ["::1/128"]}, True),
        ("nftables", {"nodePortAddresses": ["all", "127.0.0.0/8"]}, True),
        ("nftables", {"nodePortAddresses": ["0.0.0.0/0"]}, False),
        ("nftables", {"nodePortAddresses": ["64.0.0.0/2"]}, False),
        ("nftables", {}, False),
        ("iptables", {"nodePortAddresses": ["localhost"]}, False),
        (
            "nftables",
            {"nodePortAddresses": ["localhost"], "featureGates": {"KubeProxyNFTablesLocalhostNodePorts": False}},
            False,
        ),
    ],
)
def test_the_agent_listens_for_node_ports_where_loopback_addresses_are_named_in_nftables_mode(mode, fields, listens):
    configuration = load({"mode": mode, **fields}).configuration
    asked = Request(ClusterState(), configuration, agent=True)
    found = choose.choose_mode(asked).mode
    assert found.subsystems.listeners is listens
    assert with_listeners(found, configuration, ClusterState()) is found
    alone = choose.choose_mode(asked._replace(agent=False))
    assert not alone.mode.subsystems.listeners
    assert any("need the agent" in text for text in alone.warnings) is listens


@pytest.mark.parametrize("mode", ["nftables", "iptables", "ipvs", "userspace"])
def test_the_agent_has_listeners_beside_any_mode_where_a_static_service_asks(impossible, mode, tmp_path):
    asking, plain = with_static(**{"kubenode.proxy/mode": "userspace"}), with_static()
    own = mode == "userspace"
    for cluster, beside in ((asking, True), (plain, False)):
        found = choose.choose_mode(request(mode, agent=True)._replace(cluster=cluster)).mode
        assert (found.name, found.subsystems.listeners) == (mode, beside or own)
        configuration = load({}).configuration
        assert with_listeners(found, configuration, asking).subsystems.listeners
        assert with_listeners(found, configuration, plain).subsystems.listeners is own
        assert with_listeners(found, configuration, cluster) is found
    # Without an agent nothing can listen, and a check where none runs says what such a run would do.
    check = request(mode, check=True, state_directory=str(tmp_path))._replace(cluster=asking)
    assert choose.choose_mode(check).mode.subsystems.listeners is own
    if not own:
        assert not choose.choose_mode(check._replace(check=False)).mode.subsystems.listeners
