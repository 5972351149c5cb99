# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Loading of a configuration from a file, text or mappings: a KubeProxyConfiguration and a NodeProxyConfiguration."""

from __future__ import annotations

from typing import Any, Mapping, NamedTuple, Optional, Union

from ..base.addresses import address_and_port, canonical_address, family_of
from ..base.errors import ConfigurationError, errors_as, os_errors
from ..base.mode_names import AUTO
from ..cluster.fields import shown
from .behaviour import KUBE_PROXY_RELEASE
from .documents import Documents, check_type, parse_documents
from .feature_gates import expanded, is_known, locked_problem
from .field import read_fields
from .fields import FIELDS, NODE_FIELDS
from .gate_table import REMOVED
from .model import API_VERSION, KIND, KubeProxyConfiguration
from .node_proxy import API_VERSION as NODE_API_VERSION
from .node_proxy import KIND as NODE_KIND
from .node_proxy import NodeProxyConfiguration
from .reader import Findings, Section, raise_all
from .validate import validate, validate_node_proxy, without_effect

#: The default ports of healthzBindAddress and metricsBindAddress: kube-proxy's, and those beside a running kube-proxy.
_PORTS = (10256, 10249)
_PORTS_BESIDE_KUBE_PROXY = (10266, 10267)
_PREFIX = "KubeProxyConfiguration: "
_MODE_NOT_SET = f"{_PREFIX}mode: is not set; the default, iptables, becomes nftables in kube-proxy 1.40: set it"


class LoadedConfiguration(NamedTuple):
    """A valid configuration, and warnings about its source, one line each."""

    configuration: KubeProxyConfiguration
    warnings: tuple[str, ...]


def load(
    source: Union[str, bytes, Mapping[str, Any]], mode: str = "", node_source: Optional[Mapping[str, Any]] = None
) -> LoadedConfiguration:
    """Read a configuration from the text of a file (YAML or JSON), or from a mapping of its fields.

    ``node_source``: the fields of a NodeProxyConfiguration, which replaces the one in a file. Duplicate fields, fields
    and feature gates that only a later kube-proxy may know, and settings that have no effect here cause warnings. In a
    mapping apiVersion and kind may be absent. A ``mode`` replaces the one in the source, unless it is ``auto``, which
    is chosen later. Without any, a warning says that the default will change. Raises ConfigurationError, which names
    every invalid and every misspelt field.
    """
    warnings: list[str] = []
    if isinstance(source, Mapping):
        documents = Documents({"apiVersion": API_VERSION, "kind": KIND, **source}, {})
    else:
        documents = parse_documents(source, warnings)
    findings, node_findings = Findings(KIND), Findings(NODE_KIND)
    root = Section(documents.kube_proxy, "", findings)
    check_type(documents.kube_proxy, KIND, API_VERSION)
    root.text("apiVersion")
    root.text("kind")
    node_proxy = _read_node_proxy(documents.node_proxy if node_source is None else node_source, node_findings)
    standalone = node_proxy.network_policy.standalone
    chosen = "" if mode == AUTO else mode
    configuration = _read(root, chosen, _PORTS_BESIDE_KUBE_PROXY if standalone else _PORTS)
    root.finish()
    validate(configuration, findings)
    raise_all(findings, node_findings)
    warnings += findings.warnings
    if not (mode or documents.kube_proxy.get("mode") or standalone):
        warnings.append(_MODE_NOT_SET)
    warnings += [f"{_PREFIX}{text}" for text in without_effect(configuration, documents.kube_proxy)]
    warnings += node_findings.warnings
    return LoadedConfiguration(configuration._replace(node_proxy=node_proxy), tuple(warnings))


def load_file(path: str, mode: str = "", node_source: Optional[Mapping[str, Any]] = None) -> LoadedConfiguration:
    """Read the configuration file ``path``; see :func:`load`. Raises ConfigurationError, which names the file."""
    content = _content_of(path)
    with errors_as(ConfigurationError, path, ConfigurationError):
        return load(content, mode, node_source)


def documents_in(path: str) -> Documents:
    """Return both documents of the configuration file ``path`` as they are; see :func:`load_file`."""
    return parse_documents(_content_of(path), [])


def _content_of(path: str) -> bytes:
    with os_errors(ConfigurationError, path), open(path, "rb") as stream:
        return stream.read()


def load_given(path: str, mode: str = "") -> LoadedConfiguration:
    """Read the configuration file ``path``, or return the defaults if it is empty; see :func:`load`."""
    return load_file(path, mode) if path else load({}, mode)


def _read(root: Section, mode: str, ports: tuple[int, int]) -> KubeProxyConfiguration:
    found = read_fields(FIELDS, root, KubeProxyConfiguration())
    any_address, loopback = ("::", "::1") if family_of(found.bind_address) == "IPv6" else ("0.0.0.0", "127.0.0.1")
    return found._replace(
        mode=mode or found.mode,
        feature_gates=_feature_gates(root),
        logging=found.logging._replace(rest=root.section("logging").rest(("vmodule", "options"))),
        healthz_bind_address=_with_port(found.healthz_bind_address or any_address, ports[0]),
        metrics_bind_address=_with_port(found.metrics_bind_address or loopback, ports[1]),
    )


def _read_node_proxy(values: Mapping[str, Any], findings: Findings) -> NodeProxyConfiguration:
    root = Section({"apiVersion": NODE_API_VERSION, "kind": NODE_KIND, **values}, "", findings)
    for name, expected in (("apiVersion", NODE_API_VERSION), ("kind", NODE_KIND)):
        value = root.text(name)
        if value != expected:
            root.wrong(name, value, expected)
    found = read_fields(NODE_FIELDS, root, NodeProxyConfiguration())
    root.finish()
    validate_node_proxy(found, findings)
    return found


def _feature_gates(root: Section) -> tuple[tuple[str, bool], ...]:
    gates: dict[str, bool] = {}
    for name, value in root.items("featureGates"):
        field = f"featureGates.{name}"
        if not isinstance(value, bool):
            root.findings.problem(field, f"{shown(value)} is not true or false")
            continue
        problem = locked_problem(str(name), value)
        if problem:
            root.findings.problem(field, problem)
        elif is_known(str(name)):
            gates[str(name)] = value
        elif name not in REMOVED:
            reason = f"kube-proxy {KUBE_PROXY_RELEASE} has no such feature gate"
            root.findings.warnings.append(f"{_PREFIX}{field}: has no effect: {reason}")
    return tuple(sorted(expanded(gates).items()))


def _with_port(address: str, port: int) -> str:
    bare = canonical_address(address)
    return address if bare is None else address_and_port(bare, port)
