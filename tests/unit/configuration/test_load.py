# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""KubeProxyConfiguration: defaults, formats, warnings, every invalid field, and serialisation."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ansible_collections.kubenode.proxy.plugins.module_utils.base.durations import format_duration, parse_duration
from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import ConfigurationError
from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.documents import to_mapping
from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.feature_gates import BETA, DEFAULTS
from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.gate_table import GATES
from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.load import load, load_file, load_given
from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.model import KubeProxyConfiguration
from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.validate import in_mode
from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.values import split_host_port
from tests.unit.configuration.kubeadm_configuration import KUBEADM

HEAD = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"


def loaded(**fields):
    configuration, warnings = load({"mode": "iptables", **fields})
    assert warnings == ()
    return configuration


def test_an_empty_file_gives_the_defaults():
    configuration, warnings = load(HEAD)
    assert configuration == KubeProxyConfiguration() and len(warnings) == 1
    assert load({}).configuration == configuration
    assert load(HEAD.encode() + b"mode: null\niptables:\nconntrack: {}\nnodePortAddresses: null\n")[0] == configuration
    assert (configuration.mode, configuration.detect_local_mode) == ("iptables", "ClusterCIDR")
    assert (configuration.sync_period, configuration.min_sync_period) == (30.0, 1.0)
    assert configuration.masquerade_mark == 0x4000 and configuration.scheduler == "rr"
    assert configuration.conntrack.tcp_established_timeout == 86400.0


def test_kubeadms_configuration():
    configuration, (warning,) = load(KUBEADM)
    assert "mode: is not set" in warning and load(KUBEADM, "iptables") == (configuration, ())
    assert configuration.client_connection.kubeconfig == "/var/lib/kube-proxy/kubeconfig.conf"
    assert configuration.client_connection.qps == 5.0 and configuration.client_connection.burst == 10
    expected = KubeProxyConfiguration(
        cluster_cidrs=("10.244.0.0/16", "fd00:10:244::/48"),
        conntrack=KubeProxyConfiguration().conntrack._replace(max_per_core=0),
        client_connection=configuration.client_connection,
        logging=configuration.logging,
    )
    assert configuration == expected


def test_json_and_yaml_read_the_same():
    fields = {"mode": "ipvs", "ipvs": {"scheduler": "sh", "excludeCIDRs": ["10.1.2.3/8"], "syncPeriod": "1m30s"}}
    text = json.dumps({"apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "kind": "KubeProxyConfiguration", **fields})
    configuration = loaded(**fields)
    assert load(text).configuration == configuration
    assert (
        load(HEAD + "mode: ipvs\nipvs: {scheduler: sh, excludeCIDRs: [10.1.2.3/8], syncPeriod: 1m30s}")[0]
        == configuration
    )
    assert configuration.ipvs.exclude_cidrs == ("10.0.0.0/8",)


def test_mode_decides_which_block_counts():
    fields = {
        "iptables": {"syncPeriod": "10s", "masqueradeAll": True, "masqueradeBit": 3},
        "ipvs": {"syncPeriod": "20s"},
        "nftables": {"syncPeriod": "40s", "masqueradeBit": 5},
    }

    def effective(mode):
        configuration = load(fields, mode).configuration
        assert configuration == load({**fields, "mode": mode}).configuration
        return (
            configuration.sync_period,
            configuration.min_sync_period,
            configuration.masquerade_all,
            configuration.masquerade_mark,
            configuration.effective_node_port_addresses,
        )

    assert effective("iptables") == (10.0, 1.0, True, 8, ())
    assert effective("ipvs") == (20.0, 0.0, True, 8, ())
    assert effective("nftables") == (40.0, 1.0, False, 32, ("primary",))
    assert in_mode(load(fields, "ipvs")[0], "iptables") == load(fields, "iptables")[0]


def test_addresses_get_ports_and_follow_the_family_of_the_bind_address():
    v6 = loaded(bindAddress="::")
    assert (v6.healthz_bind_address, v6.metrics_bind_address) == ("[::]:10256", "[::1]:10249")
    given_ones = loaded(healthzBindAddress="192.0.2.1", metricsBindAddress="fd00::1")
    assert (given_ones.healthz_bind_address, given_ones.metrics_bind_address) == ("192.0.2.1:10256", "[fd00::1]:10249")
    assert loaded(healthzBindAddress="0.0.0.0:1").healthz_bind_address == "0.0.0.0:1"


def test_names_and_lists():
    configuration = loaded(
        hostnameOverride="  Node-A ",
        clusterCIDR="10.244.0.1/16, fd00:10::/64",
        nodePortAddresses=["primary"],
        conntrack={"maxPerCore": 0, "udpTimeout": "5s"},
        featureGates={"AllBeta": False, **{name: True for name, gate in GATES.items() if gate.stage == BETA}},
    )
    assert configuration.hostname_override == "node-a"
    assert configuration.cluster_cidrs == ("10.244.0.0/16", "fd00:10::/64")
    assert configuration.node_port_addresses == ("primary",)
    assert configuration.conntrack.max_per_core == 0 and configuration.conntrack.udp_timeout == 5.0
    assert {name: configuration.gate(name) for name in DEFAULTS} == DEFAULTS
    configuration = load({"featureGates": {"AllAlpha": True, "LoggingAlphaOptions": False}}).configuration
    assert configuration.gate("NativeHistograms") and not configuration.gate("LoggingAlphaOptions")
    assert configuration.gate("AllowServiceExternalIPs")
    assert {name: configuration.gate(name) for name in DEFAULTS} == {**DEFAULTS, "NativeHistograms": True}


def test_unknown_and_duplicate_fields_are_warned_of():
    text = (
        HEAD
        + "mode: iptables\nmode: ipvs\nfoo: 2020-01-01\n"
        + "ipvs: {bar: 1, scheduler: sh}\nconntrack: {later: true}\n"
    )
    configuration, warnings = load(text)
    assert configuration.mode == "ipvs" and configuration.scheduler == "sh"
    assert warnings == (
        'KubeProxyConfiguration: duplicate field "mode"; the last one counts',
        'KubeProxyConfiguration: unknown field "ipvs.bar"',
        'KubeProxyConfiguration: unknown field "conntrack.later"',
        'KubeProxyConfiguration: unknown field "foo"',
    )
    duplicate = load(json.dumps(to_mapping(configuration))[:-1] + ', "mode": "iptables"}')
    assert duplicate.configuration.mode == "iptables" and len(duplicate.warnings) == 1


@pytest.mark.parametrize(
    ("fields", "meant"),
    [
        ({"clusterCidr": "10.0.0.0/8"}, "clusterCIDR"),
        ({"conntrack": {"tcpbeliberal": True}}, "tcpBeLiberal"),
        ({"nodePortAddress": ["127.0.0.0/8"]}, "nodePortAddresses"),
        ({"iptables": {"masquerade_all": True}}, "masqueradeAll"),
        ({"featureGate": {}}, "featureGates"),
    ],
)
def test_a_misspelt_field_is_an_error_with_the_right_name(fields, meant):
    with pytest.raises(
        ConfigurationError, match=f"^KubeProxyConfiguration: unknown field .*; did you mean {meant}[?]$"
    ):
        load(fields)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "is empty"),
        ("[", "not valid YAML: .* at line 1"),
        ("a: b: c", "not valid YAML: .* at line 1 column 5"),
        ("- a", "a list is not an object with fields"),
        ("just words", '"just words" is not an object with fields'),
        (b"\xff", "not UTF-8 text at byte 0"),
        (HEAD + "---\n" + HEAD, "contains 2 YAML documents"),
        ("mode: ipvs", "kind: is missing; it must be KubeProxyConfiguration"),
        ("kind: KubeProxyConfiguration", "apiVersion: is missing"),
        (HEAD.replace("KubeProxyC", "KubeletC"), 'kind: "KubeletConfiguration" is not KubeProxyConfiguration'),
        (HEAD.replace("v1alpha1", "v1alpha2"), 'apiVersion: "kubeproxy.config.k8s.io/v1alpha2" is not'),
    ],
)
def test_files_that_are_not_a_configuration(text, reason):
    with pytest.raises(ConfigurationError, match=f"^KubeProxyConfiguration: {reason}"):
        load(text)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"mode": "kernelspace"}, 'mode: "kernelspace" is not one of iptables, ipvs, nftables, userspace, auto'),
        ({"mode": 3}, "mode: 3 is not a string"),
        ({"bindAddress": "localhost"}, 'bindAddress: "localhost" is not an IP address'),
        ({"healthzBindAddress": "0.0.0.0:0"}, 'healthzBindAddress: "0" is not a port between 1 and 65535'),
        ({"healthzBindAddress": "host:80"}, 'healthzBindAddress: "host" is not an IP address'),
        ({"metricsBindAddress": "[::1]"}, 'metricsBindAddress: "[::1]" is not ADDRESS:PORT'),
        ({"metricsBindAddress": "127.0.0.1:http"}, 'metricsBindAddress: "http" is not a port'),
        ({"configSyncPeriod": "-1s"}, "configSyncPeriod: must be greater than 0"),
        ({"enableProfiling": "yes"}, 'enableProfiling: "yes" is not true or false'),
        ({"oomScoreAdj": -1001}, "oomScoreAdj: -1001 is not between -1000 and 1000"),
        ({"clientConnection": {"burst": -1}}, "clientConnection.burst: -1 is not between 0"),
        ({"clientConnection": []}, "clientConnection: a list is not an object"),
        ({"clientConnection": {"qps": "5"}}, 'clientConnection.qps: "5" is not a number'),
        ({"logging": {"format": "xml"}}, 'logging.format: "xml" is not text or json'),
        ({"iptables": {"masqueradeBit": 32}}, "iptables.masqueradeBit: 32 is not between 0 and 31"),
        ({"mode": "ipvs", "iptables": {"masqueradeBit": -1}}, "iptables.masqueradeBit: -1 is not between 0 and 31"),
        ({"iptables": {"masqueradeBit": True}}, "iptables.masqueradeBit: true is not an integer"),
        ({"iptables": {"syncPeriod": "-1s"}}, "iptables.syncPeriod: must be greater than 0"),
        ({"iptables": {"minSyncPeriod": "-1s"}}, "iptables.minSyncPeriod: must not be negative"),
        ({"iptables": {"minSyncPeriod": "31s"}}, "iptables.minSyncPeriod: must not be greater than iptables."),
        ({"iptables": {"syncPeriod": 30}}, "iptables.syncPeriod: 30 is not a duration such as 30s or 1m30s"),
        ({"iptables": {"syncPeriod": "30"}}, 'iptables.syncPeriod: "30" is not a duration'),
        ({"mode": "ipvs", "ipvs": {"minSyncPeriod": "1h"}}, "ipvs.minSyncPeriod: must not be greater than"),
        ({"mode": "ipvs", "ipvs": {"tcpTimeout": "-1s"}}, "ipvs.tcpTimeout: must not be negative"),
        ({"mode": "ipvs", "ipvs": {"excludeCIDRs": ["10.0.0.1"]}}, 'ipvs.excludeCIDRs[0]: "10.0.0.1" is not a CIDR'),
        ({"mode": "ipvs", "ipvs": {"scheduler": "rr\n-A"}}, "ipvs.scheduler: "),
        ({"ipvs": {"excludeCIDRs": "10.0.0.0/8"}}, 'ipvs.excludeCIDRs: "10.0.0.0/8" is not a list of strings'),
        ({"mode": "nftables", "nftables": {"masqueradeBit": 32}}, "nftables.masqueradeBit: 32 is not between 0 and 31"),
        ({"detectLocalMode": "Magic"}, 'detectLocalMode: "Magic" is not one of ClusterCIDR, NodeCIDR'),
        ({"detectLocalMode": "BridgeInterface"}, "detectLocal.bridgeInterface: must not be empty"),
        ({"detectLocalMode": "BridgeInterface", "detectLocal": {"bridgeInterface": 'x" -j DROP'}},
         "detectLocal.bridgeInterface: "),
        ({"detectLocalMode": "InterfaceNamePrefix"}, "detectLocal.interfaceNamePrefix: must not be empty"),
        ({"detectLocalMode": "InterfaceNamePrefix", "detectLocal": {"interfaceNamePrefix": "a" * 15}},
         "detectLocal.interfaceNamePrefix: "),
        ({"clusterCIDR": "10.0.0.0"}, 'clusterCIDR[0]: "10.0.0.0" is not a CIDR'),
        ({"clusterCIDR": "10.0.0.0/8,11.0.0.0/8"}, "clusterCIDR: must be one CIDR, or one of each IP family"),
        ({"nodePortAddresses": ["primary", "10.0.0.1"]}, 'nodePortAddresses[1]: "10.0.0.1" is not a CIDR, primary'),
        ({"nodePortAddresses": [1]}, "nodePortAddresses: a list is not a list of strings"),
        ({"conntrack": {"min": -1}}, "conntrack.min: -1 is not between 0"),
        ({"conntrack": {"udpTimeout": "-5s"}}, "conntrack.udpTimeout: must not be negative"),
        ({"featureGates": {"NFTablesProxyMode": False}}, "featureGates.NFTablesProxyMode: is locked to true"),
        ({"featureGates": {"AllowServiceExternalIPs": "no"}}, "featureGates.AllowServiceExternalIPs: "),
    ],
)  # fmt: skip
def test_invalid_fields_are_named(fields, problem):
    with pytest.raises(ConfigurationError) as caught:
        load(fields)
    assert str(caught.value).startswith(f"KubeProxyConfiguration: {problem}")


def test_blocks_of_other_modes_are_not_validated():
    fields = {
        "ipvs": {"excludeCIDRs": ["x"], "minSyncPeriod": "1h", "tcpTimeout": "-1s"},
        "nftables": {"masqueradeBit": 99, "minSyncPeriod": "1h"},
        "detectLocalMode": "NodeCIDR",
        "clusterCIDR": "x,y,z",
    }
    assert load(fields).configuration.mode == "iptables"
    with pytest.raises(ConfigurationError, match="excludeCIDRs"):
        load(fields, mode="ipvs")
    with pytest.raises(ConfigurationError, match="excludeCIDRs"):
        in_mode(load(fields).configuration, "ipvs")
    with pytest.raises(ConfigurationError, match="mode: "):
        in_mode(load({}).configuration, "auto")


@pytest.mark.parametrize(
    ("mode", "periods"),
    [
        ("nftables", {"syncPeriod": "500ms"}),
        ("ipvs", {"syncPeriod": "10s", "minSyncPeriod": "20s"}),
        ("nftables", {"syncPeriod": "-1s", "minSyncPeriod": "-1s"}),
    ],
)
def test_periods_of_the_iptables_block_are_validated_in_modes_that_use_them(mode, periods):
    fields = {"iptables": periods}
    accepted = load({**fields, "mode": mode}).configuration
    for using in ("iptables", "userspace"):
        with pytest.raises(ConfigurationError, match=r"iptables\.(m|s)"):
            load({**fields, "mode": using})
        with pytest.raises(ConfigurationError, match=r"iptables\.(m|s)"):
            in_mode(accepted, using)
    with pytest.raises(ConfigurationError, match="masqueradeBit"):
        load({"mode": mode, "iptables": {"masqueradeBit": 32}})


def test_all_problems_are_reported_together():
    with pytest.raises(ConfigurationError) as caught:
        load({"mode": "x", "bindAddress": "y", "conntrack": {"min": "z"}})
    assert all(field in str(caught.value) for field in ("mode:", "bindAddress:", "conntrack.min:"))


STANDALONE = {"networkPolicy": {"enabled": True, "standalone": True}}


@pytest.mark.parametrize(
    ("source", "mode", "node_source", "expected"),
    [
        (HEAD, "", None, 1),
        (HEAD + "mode: ''\n", "", None, 1),
        (HEAD + "mode: iptables\n", "", None, 0),
        (HEAD, "iptables", None, 0),
        # What a module or the roles give: fields, and a mode of their own.
        ({}, "", None, 1),
        ({"mode": ""}, "", None, 1),
        ({"mode": "ipvs"}, "", None, 0),
        ({}, "ipvs", None, 0),
        # A mode is requested, and chosen later; or none has an effect.
        (HEAD, "auto", None, 0),
        ({}, "auto", None, 0),
        (HEAD, "", STANDALONE, 0),
    ],
)
def test_a_configuration_without_a_mode_is_noticed(source, mode, node_source, expected):
    loaded = load(source, mode, node_source)
    assert loaded.configuration.mode in ("iptables", "ipvs")
    assert sum("mode: is not set; the default, iptables" in warning for warning in loaded.warnings) == expected


@pytest.mark.parametrize(("mode", "expected"), [("", 1), ("auto", 0), ("nftables", 0)])
def test_commands_and_the_agent_notice_that_no_mode_is_set(tmp_path, mode, expected):
    path = tmp_path / "config.yaml"
    path.write_text(HEAD)
    for place in ("", str(path)):
        assert sum("mode: is not set" in warning for warning in load_given(place, mode).warnings) == expected


def test_files(tmp_path):
    path = tmp_path / "config.conf"
    path.write_text(HEAD + "mode: ipvs\n")
    assert load_file(str(path)).configuration.mode == "ipvs"
    path.write_text("mode: ipvs\n")
    with pytest.raises(ConfigurationError, match=r"config\.conf: KubeProxyConfiguration: kind: is missing"):
        load_file(str(path))
    with pytest.raises(ConfigurationError, match="none: No such file"):
        load_file(str(tmp_path / "none"))


@pytest.mark.parametrize("mode", ["iptables", "ipvs", "nftables"])
def test_configuration_survives_serialisation(mode):
    configuration = load(KUBEADM, mode).configuration
    mapping = to_mapping(configuration)
    again, warnings = load(json.dumps(mapping))
    assert warnings == () and to_mapping(again) == mapping
    assert again == configuration._replace(node_port_addresses=configuration.effective_node_port_addresses)
    assert mapping["conntrack"]["tcpEstablishedTimeout"] == "24h0m0s"


@pytest.mark.parametrize(
    ("text", "seconds", "canonical"),
    [
        ("0", 0.0, "0s"), ("0s", 0.0, "0s"), ("1m30s", 90.0, "1m30s"), ("24h", 86400.0, "24h0m0s"),
        ("1.5s", 1.5, "1.5s"), ("500ms", 0.5, "500ms"), ("1.5h", 5400.0, "1h30m0s"), ("-2s", -2.0, "-2s"),
        ("+1s", 1.0, "1s"), ("10us", 1e-5, "10µs"), ("10µs", 1e-5, "10µs"), ("3ns", 3e-9, "3ns"), (".5m", 30.0, "30s"),
        ("1.s", 1.0, "1s"), ("90m", 5400.0, "1h30m0s"), ("1h1ms", 3600.001, "1h0m0.001s"),
    ],
)  # fmt: skip
def test_durations(text, seconds, canonical):
    assert parse_duration(text) == seconds
    assert format_duration(seconds) == canonical


@pytest.mark.parametrize(
    "text", ["", "s", "1", "1 s", "1d", "-", "+", ".s", "1s ", "1,5s", "٣s", "9" * 30 + "h", "1s" * 40]
)
def test_not_durations(text):
    assert parse_duration(text) is None


@given(st.integers(-(10**15), 10**15))
def test_durations_survive_serialisation(microseconds):
    seconds = microseconds / 10**6
    assert parse_duration(format_duration(seconds)) == pytest.approx(seconds, abs=1e-6)


@pytest.mark.parametrize(
    "text", ["", "80", ":80", "[::1]80", "::1:80", "1.2.3.4:", "1.2.3.4:-1", "1.2.3.4:99999", "[1.2.3.4]:80"]
)
def test_not_an_address_with_a_port(text):
    with pytest.raises(ValueError):
        split_host_port(text)


@given(
    st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=6)),
        lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
        max_leaves=4,
    ),
    st.data(),
)
def test_any_value_of_any_field_raises_only_the_documented_error(value, data):
    mapping = to_mapping(KubeProxyConfiguration())
    name = data.draw(st.sampled_from(sorted(mapping)))
    block = mapping[name]
    if isinstance(block, dict) and block and data.draw(st.booleans()):
        block[data.draw(st.sampled_from(sorted(block)))] = value
    else:
        mapping[name] = value
    try:
        configuration, _warnings = load(json.dumps(mapping))
    except ConfigurationError as error:
        assert str(error).startswith("KubeProxyConfiguration: ")
    else:
        assert isinstance(configuration, KubeProxyConfiguration)
