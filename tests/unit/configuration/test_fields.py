# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The table of the effects of each KubeProxyConfiguration field agrees with the code and with the warnings."""

from __future__ import annotations

import ast
import re

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.configuration import feature_gates, fields, gate_table
from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.field import AGENT, NOTHING
from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.load import load
from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.model import KubeProxyConfiguration
from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.reader import Section
from tests.conftest import ROOT

ENGINE = ROOT / "plugins" / "module_utils"
PACKAGE = ENGINE / "configuration"
FIELDS = {field.name: field for field in fields.FIELDS}
NODE_FIELDS = {field.name: field for field in fields.NODE_FIELDS}
# Attribute names that other objects have as well: only reads from the right object count.
COMMON = {"format", "kubeconfig", "min", "mode", "scheduler"}


def reads(path):
    """Yield (name of the object, attribute) for each attribute that a file reads."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            owner = node.value
            name = owner.attr if isinstance(owner, ast.Attribute) else owner.id if isinstance(owner, ast.Name) else ""
            yield name, node.attr


@pytest.fixture(scope="module")
def used():
    """Provide the attributes that the engine reads outside the package ``configuration``."""
    files = [path for path in ENGINE.rglob("*.py") if PACKAGE not in path.parents]
    return {read for path in files for read in reads(path)}


@pytest.fixture(scope="module")
def derived():
    """Provide the model's properties and methods by the attributes that they read, directly or indirectly."""
    tree = ast.parse((PACKAGE / "model.py").read_text(encoding="utf-8"))
    (model,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "KubeProxyConfiguration")
    found = {}
    for method in (node for node in model.body if isinstance(node, ast.FunctionDef)):
        for node in ast.walk(method):
            if isinstance(node, ast.Attribute):
                found.setdefault(node.attr, set()).add(method.name)
    return found


def is_used(attribute, used, derived):
    section, _dot, name = attribute.rpartition(".")
    owners = {"configuration", section.rpartition(".")[2]}
    if any(read == name and (name not in COMMON or owner in owners) for owner, read in used):
        return True
    methods = derived.get(name, set()) - {name} if name not in COMMON else set()
    return any(is_used(method, used, derived) for method in methods)


def test_every_field_that_is_read_has_one_row(monkeypatch):
    known = set()

    def noted(method):
        def call(self, name, *rest):
            known.update(map(self.field, (name,) if isinstance(name, str) else name))
            return method(self, name, *rest)

        return call

    for method in ("_read", "rest", "items"):
        monkeypatch.setattr(Section, method, noted(getattr(Section, method)))
    load({})
    assert len(FIELDS) == len(fields.FIELDS) and len(NODE_FIELDS) == len(fields.NODE_FIELDS)
    blocks = {name.rpartition(".")[0] for name in known}
    assert known - blocks - {"apiVersion", "kind"} == set(FIELDS) | set(NODE_FIELDS)


def attributes(value, path=""):
    """Yield the attributes of the model, with dots."""
    for name in value._fields:
        inner = getattr(value, name)
        if hasattr(inner, "_fields"):
            yield from attributes(inner, f"{path}{name}.")
        else:
            yield f"{path}{name}"


def test_every_attribute_of_the_model_belongs_to_one_field():
    rows = [field.attribute for field in fields.FIELDS if field.attribute]
    rows += [f"node_proxy.{field.attribute}" for field in fields.NODE_FIELDS]
    assert sorted(rows) == sorted(set(attributes(KubeProxyConfiguration())) - {"logging.rest"})


@pytest.mark.parametrize("field", (*fields.FIELDS, *fields.NODE_FIELDS), ids=lambda field: field.name)
def test_a_field_is_used_where_the_table_says_so(field, used, derived):
    if field.name == "oomScoreAdj":
        units = [path.read_text(encoding="utf-8") for path in (ROOT / "roles" / "agent" / "templates").iterdir()]
        assert any(re.search(r"\boomScoreAdj\b", text) for text in units)
        return
    in_code = bool(field.attribute) and is_used(field.attribute, used, derived)
    assert in_code is (field.effect != NOTHING)
    if field.effect == AGENT:
        for path in ENGINE.rglob("*.py"):
            if path.parent.name in ("convergence", "rendering", "serviceports", "kernel"):
                assert field.attribute.rpartition(".")[2] in COMMON or not any(
                    read == field.attribute.rpartition(".")[2] for _owner, read in reads(path)
                ), path


def test_gates_are_used_where_the_table_says_so():
    texts = [path.read_text(encoding="utf-8") for path in ENGINE.rglob("*.py") if PACKAGE not in path.parents]
    constants = {value: name for name, value in vars(feature_gates).items() if isinstance(value, str)}
    assert {*feature_gates.EFFECTS, *feature_gates.REASONS} <= set(gate_table.GATES)
    for name in gate_table.GATES:
        pattern = rf'"{name}"|\b{constants.get(name, name)}\b'
        assert (name in feature_gates.EFFECTS) is any(re.search(pattern, text) for text in texts), name


# A value other than the default for each field without effect.
VAIN = {
    "clientConnection.qps": 50,
    "clientConnection.burst": 100,
    "clientConnection.contentType": "application/cbor",
    "clientConnection.acceptContentTypes": "application/cbor",
    "logging.flushFrequency": "1s",
    "logging.vmodule": [{"filePattern": "proxier*", "verbosity": 5}],
    "logging.options": {"json": {"splitStream": True}},
    "enableProfiling": True,
    "showHiddenMetricsForVersion": "1.35",
    "iptables.snatNodeInternalIP": True,
    "winkernel": {"enableDSR": True},
    "portRange": "30000-32767",
    "windowsRunAsService": True,
}


def nested(name, value):
    for part in reversed(name.split(".")):
        value = {part: value}
    return value


def test_the_fields_without_effect_are_these():
    assert set(VAIN) == {field.name for field in fields.FIELDS if field.effect == NOTHING}


@pytest.mark.parametrize("name", VAIN)
def test_a_field_without_effect_gives_a_warning(name):
    (warning,) = load(nested(name, VAIN[name]), "iptables").warnings
    assert warning == f"KubeProxyConfiguration: {name}: has no effect here: {FIELDS[name].text}"


def test_json_needs_no_warning():
    client = {"contentType": "application/json", "acceptContentTypes": "application/json", "qps": 5, "burst": 10}
    fields_ = {"clientConnection": client, "logging": {"flushFrequency": "5s"}}
    assert load(fields_, "iptables").warnings == ()


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("KubeProxyIPVS", False, "has no effect here: ipvs mode is always available"),
        ("NFTablesNetlink", False, "has no effect here: nftables mode always uses netlink"),
        ("GateOfTheYear2030", True, "has no effect: kube-proxy 1.38 has no such feature gate"),
        ("TopologyAwareHints", True, "has no effect: it is no longer a feature gate of kube-proxy"),
        ("NativeHistograms", True, "has no effect here"),
        ("ContextualLogging", False, "has no effect here"),
    ],
)
def test_gates_without_effect_never_fail(name, value, reason):
    configuration, warnings = load({"featureGates": {name: value}}, "iptables")
    assert len(warnings) == 1 and warnings[0].startswith(f"KubeProxyConfiguration: featureGates.{name}: {reason}")
    assert set(dict(configuration.feature_gates)) <= set(gate_table.GATES)


def test_gates_at_their_default_and_locked_ones_need_no_warning():
    assert load({"featureGates": dict(feature_gates.DEFAULTS)}, "iptables").warnings == ()


# kubeadm's configuration for a cluster of Kubernetes 1.37 beside the fields of 1.36, and unknown fields.
def test_configurations_of_later_versions_load():
    configuration, warnings = load(
        {
            "mode": "iptables",
            "iptables": {"snatNodeInternalIP": None, "masqueradeBit": 15, "later": None},
            "nodePortAddresses": ["primary", "localhost", "10.0.0.1/8"],
            "featureGates": {"KubeProxyNFTablesLocalhostNodePorts": False},
            "nextBlock": {"a": [1, {"b": 2}]},
            "conntrack": {"nextField": "3s"},
        }
    )
    assert configuration.masquerade_mark == 1 << 15
    assert configuration.node_port_addresses == ("primary", "127.0.0.0/8", "::1/128", "10.0.0.0/8")
    assert warnings == (
        'KubeProxyConfiguration: unknown field "conntrack.nextField"',
        'KubeProxyConfiguration: unknown field "nextBlock"',
    )
    assert load({"nodePortAddresses": ["all"]}).configuration.node_port_addresses == ("0.0.0.0/0", "::/0")


@pytest.mark.parametrize(
    ("fields", "seconds"),
    [
        ({}, 900.0),
        ({"configSyncPeriod": "10s"}, 10.0),
        ({"configSyncPeriod": "24h"}, 3600.0),
        ({"mode": "nftables", "nftables": {"syncPeriod": "5s"}}, 900.0),
        ({"mode": "ipvs"}, 30.0),
        ({"mode": "ipvs", "ipvs": {"syncPeriod": "2m"}}, 120.0),
        ({"mode": "ipvs", "ipvs": {"syncPeriod": "2m"}, "configSyncPeriod": "1m"}, 60.0),
    ],
)
def test_interval_of_the_complete_check(fields, seconds):
    assert load(fields).configuration.check_period == seconds
