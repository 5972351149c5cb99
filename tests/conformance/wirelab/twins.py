# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The IPv6 and dual stack twins of cases that were recorded for IPv4 alone.

The IPv6 twin is the case with every address translated (:mod:`.translation`): objects, flows, recording. The dual
stack twin has both: every Service has both families, every EndpointSlice comes twice, and the flows of both are run.

The twins skip what has another meaning with IPv6: flows to or from the loopback address (there are no NodePorts on
::1), the proxy's own health and metrics ports (bound to 0.0.0.0), flows whose endpoint follows from the addresses
themselves (option ``untranslated``), and commands other than those of iptables, which becomes ip6tables.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from . import translation
from .cases import Case, Step
from .corrections import KUBE_PROXY
from .flows import Flow, parse_flow
from .objects import Object, normalise
from .results import FlowResult, StepResult

SUFFIX = {"ipv6": ".ipv6", "dual": ".dual"}
_OWN_PORTS = (10249, 10256)
_IPTABLES = re.compile(r"\biptables\b")


@dataclass(kw_only=True)
class TwinCase(Case):
    """A case derived from another one. *dual*: the other one together with its translation."""

    original: Case
    dual: bool = False

    def snapshots(self) -> list[list[Object]]:
        """Return the snapshots of the original, translated or with both families."""
        return [
            _both(snapshot) if self.dual else translation.content(snapshot) for snapshot in self.original.snapshots()
        ]

    def expected(self, mode: str, behaviour: str = KUBE_PROXY, filter_backend: str = "") -> list[StepResult]:
        """Return the steps of the original, translated or twice."""
        steps: list[StepResult] = []
        for step in self.original.expected(mode, behaviour, filter_backend):
            kept = list(step["flows"]) if self.dual else []
            results = (
                _translated_result(result, self.dual)
                for result in step["flows"]
                if has_counterpart(parse_flow(result["flow"]))
            )
            steps.append({"step": step["step"], "flows": [*kept, *results]})
        return steps


def twins(cases: Iterable[Case], families: str) -> list[Case]:
    """Return the twins (``ipv6`` or ``dual``) of the cases for IPv4 alone, except those with parts that have no
    counterpart.
    """
    made = []
    for case in cases:
        if tuple(case.families) != (4,):
            continue
        try:
            twin = make_twin(case, families)
        except translation.Untranslatable:
            continue
        if any(step.flows for step in twin.steps):
            made.append(twin)
    return made


def make_twin(case: Case, families: str) -> Case:
    """Return the twin of a case. Raises Untranslatable if an address of it has no counterpart."""
    dual = families == "dual"
    return TwinCase(
        name=case.name + SUFFIX[families],
        path=case.path,
        description=case.description,
        node=case.node,
        modes=case.modes,
        config=_both_configuration(case.config) if dual else translation.content(case.config),
        pod_network=case.pod_network,
        families=(4, 6) if dual else (6,),
        steps=[_step(step, dual) for step in case.steps],
        extra_listeners=case.extra_listeners,
        node_config=_both_values(case.node_config) if dual else translation.content(case.node_config),
        original=case,
        dual=dual,
    )


def has_counterpart(flow: Flow) -> bool:
    """Report whether the flow means the same with IPv6."""
    if flow.kind == "cmd":
        return bool(_IPTABLES.search(flow.command))
    if "untranslated" in flow.options or any(end.startswith("127.") for end in (flow.source or "", flow.destination)):
        return False
    return flow.kind not in ("http", "metrics") or flow.port not in _OWN_PORTS


def _step(step: Step, dual: bool) -> Step:
    flows = [parse_flow(_flow_text(flow.text, dual)) for flow in step.flows if has_counterpart(flow)]
    commands = [_command(command) for command in step.commands]
    apply = [translation.content(item) for item in step.apply]
    config = translation.content(step.config) if step.config else step.config
    if dual:
        flows, commands, apply = [*step.flows, *flows], [*step.commands, *commands], [*step.apply, *apply]
        config = _both_configuration(step.config) if step.config else step.config
    node_config = step.node_config
    if node_config:
        node_config = _both_values(node_config) if dual else translation.content(node_config)
    return replace(step, apply=apply, commands=commands, config=config, node_config=node_config, flows=flows)


def _flow_text(text: str, dual: bool) -> str:
    if text.startswith("cmd "):
        return _command(text)
    if dual:  # open connections of the two families need different names
        text = re.sub(r"\bopen=(\S+)", r"open=\1-ipv6", text)
        text = re.sub(r"^held (\S+)", r"held \1-ipv6", text)
    return translation.text(text)


def _command(command: str) -> str:
    if not _IPTABLES.search(command):
        raise translation.Untranslatable(f"command {command!r} has no IPv6 counterpart")
    return _IPTABLES.sub("ip6tables", translation.text(command))


def _translated_result(result: FlowResult, dual: bool) -> FlowResult:
    translated = copy.copy(result)
    translated["flow"] = _flow_text(result["flow"], dual)
    if "sent" in result:
        translated["sent"] = [translation.text(source) for source in result["sent"]]
    if "outcomes" in result:
        translated["outcomes"] = {translation.text(name): count for name, count in result["outcomes"].items()}
    if "cmd" in result:
        output = [translation.text(line) for line in result["cmd"]["output"]]
        translated["cmd"] = {**result["cmd"], "output": output}
    return translated


def _both(snapshot: Sequence[Object]) -> list[Object]:
    """Return the objects with both families."""
    items: list[Object] = []
    for item in snapshot:
        if item["kind"] == "EndpointSlice" and item["addressType"] == "IPv4":
            twin = translation.content(item)
            twin["metadata"]["name"] += "-ipv6"
            items += [item, normalise(twin)]
        elif item["kind"] == "Service":
            items.append(_dual_service(item))
        elif item["kind"] == "Node":
            items.append({**item, **_both_values({"spec": item["spec"], "status": item["status"]})})
        else:
            items.append(item)
    return items


def _dual_service(item: Object) -> Object:
    twin = {**item, **_both_values({"spec": item["spec"], "status": item["status"]})}
    annotations = item["metadata"].get("annotations") or {}
    if annotations.get(translation.SOURCES):
        listed = annotations[translation.SOURCES]
        both = {**annotations, translation.SOURCES: f"{listed},{translation.sources(listed)}"}
        twin["metadata"] = {**item["metadata"], "annotations": both}
    spec = twin["spec"]
    if spec.get("ipFamilies"):
        spec["ipFamilyPolicy"] = "RequireDualStack"
    return twin


def _both_values(value: Any) -> Any:
    """Return every list with its IPv4 content followed by the translation; a single value is unchanged."""
    if isinstance(value, dict):
        return {key: _both_values(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [*value, *(entry for entry in translation.content(value) if entry not in value)]
    return value


def _both_configuration(changes: dict[str, Any]) -> dict[str, Any]:
    """Return changes of the KubeProxyConfiguration, whose clusterCIDR is a list with commas, for both families."""
    both: dict[str, Any] = _both_values(changes)
    if changes.get("clusterCIDR"):
        both["clusterCIDR"] = f"{changes['clusterCIDR']},{translation.network(changes['clusterCIDR'])}"
    return both
