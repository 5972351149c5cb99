# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Documented return values match the code: types, keys and names of tables."""

from __future__ import annotations

import importlib
import pkgutil
import re
from pathlib import Path

import pytest
import yaml

from ansible_collections.kubenode.proxy.plugins import module_utils
from ansible_collections.kubenode.proxy.plugins.module_utils.base.addresses import FAMILIES
from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import Refusal
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.report import counts
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.request import TableChange
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.xtables.variant import NFT, VARIANTS, XtablesVariant
from ansible_collections.kubenode.proxy.plugins.module_utils.module_support.results import change_result, drift_summary
from ansible_collections.kubenode.proxy.plugins.module_utils.module_support.tables import change_records
from ansible_collections.kubenode.proxy.plugins.module_utils.resources import (
    Change,
    Kind,
    PlannedChange,
    Resource,
    label,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.rollback.state import NodeState

ROOT = Path(__file__).resolve().parents[3]
ENGINE = ROOT / "plugins" / "module_utils"
TYPES = {"str": str, "int": int, "bool": bool, "list": list, "dict": dict, "float": (int, float)}
# Kinds that belong to neither family.
NODE_WIDE = (Kind.SYSCTLS, Kind.MODULES, Kind.MODULE_PARAMETERS, Kind.FILES, Kind.DEVICES, Kind.TIMEOUTS)

QUALIFIERS = ("", *VARIANTS, "of iptables mode", "monitoring")


def modules():
    found = {}
    for path in sorted((ROOT / "plugins" / "modules").glob("*.py")):
        text = re.search(r'^RETURN = r?"""\n(.*?)^"""', path.read_text(), re.MULTILINE | re.DOTALL)
        found[path.stem] = yaml.safe_load(text.group(1)) if text else {}
    return found


MODULES = modules()


def returned(items, path=""):
    """Yield every documented value with its path."""
    for name, item in items.items():
        yield path + name, item
        yield from returned(item.get("contains") or {}, f"{path}{name}.")


# Results with a meaning for Ansible itself: those that change how a task counts, and those of loops, retries, facts and
# asynchronous tasks.
ANSIBLE_RESULTS = {
    *("ansible_facts", "ansible_job_id", "add_group", "add_host", "attempts", "deprecations", "exception", "failed"),
    *("failed_when_result", "finished", "invocation", "item", "results", "results_file", "retries", "skip_reason"),
    *("skipped", "started", "stopped_at", "unreachable", "warnings"),
}


@pytest.mark.parametrize("module", MODULES)
def test_no_result_has_a_meaning_for_ansible(module):
    """With a result ``skipped``, for example, a task counts as skipped, and its changes and handlers are lost."""
    assert not ANSIBLE_RESULTS.intersection(MODULES[module])


SAMPLES = [
    pytest.param(item, item["sample"], id=f"{module}-{path}")
    for module, items in MODULES.items()
    for path, item in returned(items)
    if "sample" in item
]


def kinds():
    return {value for name, value in vars(Kind).items() if name.isupper()}


def labels():
    """Return every label that a resource can have."""
    found = set()
    for kind in kinds():
        for family in ("",) if kind in NODE_WIDE else FAMILIES:
            found.update(label(kind, family, qualifier) for qualifier in QUALIFIERS)
    return found


def subclasses(kind):
    for item in kind.__subclasses__():
        yield item
        yield from subclasses(item)


def test_every_resource_is_of_a_known_kind():
    for module in pkgutil.walk_packages([str(ENGINE)], f"{module_utils.__name__}."):
        if "prometheus" not in module.name:
            importlib.import_module(module.name)
    resources = {item for item in subclasses(Resource) if item.__module__.startswith(module_utils.__name__)}
    assert len(resources) > 10
    # A wrapper has the kind of the resource it wraps.
    wrappers = {"WrappedResource", "ObservedOnce", "UnloadedResource", "OnlyOurServers", "LocalnetRouting"}
    unknown = {item.__name__ for item in resources if item.kind not in kinds()}
    assert unknown <= wrappers


def test_labels():
    assert label(Kind.CHAINS, "IPv4") == "IPv4 chains"
    assert label(Kind.CHAINS, "IPv6", "nft") == "IPv6 chains (nft)"
    assert label(Kind.SYSCTLS) == "sysctls"


@pytest.mark.parametrize(("item", "sample"), SAMPLES)
def test_sample_has_the_type_that_is_documented(item, sample):
    assert isinstance(sample, TYPES[item["type"]])
    assert item["type"] == "bool" or not isinstance(sample, bool)
    for element in sample if item["type"] == "list" else ():
        assert isinstance(element, TYPES[item["elements"]])


CHANGES = {
    module: items["changes"] for module, items in MODULES.items() if items.get("changes", {}).get("elements") == "dict"
}


@pytest.mark.parametrize("documented", CHANGES.values(), ids=CHANGES)
def test_documented_changes_match_the_code(documented):
    resource = Resource()
    resource.kind = Kind.CHAINS
    possible = [
        set(change_result([TableChange("IPv4 chains", 1, 0, 0)])[0]),
        set(change_records([PlannedChange(resource, Change(added={"key": 1}))])[0]),
    ]
    assert documented["sample"]
    for change in documented["sample"]:
        assert change["table"] in labels()
        assert set(change) in possible
        assert set(documented.get("contains") or change) == set(change)


def test_summary_and_programmed():
    info = MODULES["service_proxy_info"]
    changes = [TableChange("IPv4 chains", 0, 1, 0), TableChange("IPv4 real servers", 2, 0, 0)]
    assert info["summary"]["sample"] == drift_summary(changes)
    assert set(info["programmed"]["sample"]) <= labels()


@pytest.mark.parametrize("module", ["service_proxy", "service_proxy_info"])
def test_counts_refused_and_reasons(module):
    items = MODULES[module]
    assert set(items["counts"]["sample"]) == set(counts([], []))
    contains = items["refused"].get("contains")
    assert contains is None or tuple(contains) == Refusal._fields
    engine = "".join(path.read_text() for path in sorted((ENGINE / "convergence").rglob("*.py")))
    assert f'"{items["mode_reason"]["sample"]}"' in engine
    reason = "kubelet's chain KUBE-IPTABLES-HINT is in mangle"
    variant = XtablesVariant(family="IPv4", name=NFT, reason=reason, version=(1, 8, 9), main="", save="", restore="")
    assert items["variant"]["sample"] == str(variant)
    choice = (ENGINE / "kernel" / "xtables" / "variant.py").read_text()
    assert reason.replace("KUBE-IPTABLES-HINT", "{chain}") in choice


def test_counts_of_saved_states():
    sample = MODULES["service_proxy_rollback"]["states"]["contains"]["counts"]["sample"]
    assert set(sample) == set(NodeState(chains=()).counts())
