# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Who handles this node's Service traffic, or drops it: running programs, a firewall, and files that say so."""

from __future__ import annotations

import os
import re
from typing import NamedTuple, Optional, Sequence

from ..base.installed import CONFIGURATION_FILE, KEPT_OFF_FILE
from ..kernel import facts
from .findings import (
    CILIUM,
    EMBEDDED_KUBE_PROXY,
    ERROR,
    FIREWALLD,
    KEPT_OFF,
    KUBE_PROXY,
    KUBE_ROUTER,
    UFW,
    WARNING,
    Finding,
)

_STANDALONE = re.compile(r"^[^#\n]*\bstandalone[\"']?\s*:\s*(?:true|yes|on)\b", re.IGNORECASE | re.MULTILINE)
_KEPT_OFF = f"kube-proxy is kept off this node ({KEPT_OFF_FILE})"
_BACK = "give the node back (kubenode.proxy.migrate with migrate_direction=back)"
_SERVICE_PROXIES = (KUBE_PROXY, KUBE_ROUTER, EMBEDDED_KUBE_PROXY, CILIUM)
_FALSE = ("false", "0", "f")
_EMBEDDING = {"k3s", "k3s-server", "k3s-agent", "rke2"}


class Process(NamedTuple):
    """A running process that may change this network namespace: number, program name and arguments."""

    number: int
    name: str
    arguments: tuple[str, ...]


def processes(root: str = "") -> list[Process]:
    """Return the processes that may change our network namespace, except those that we may not inspect.

    Others have no influence on it, whatever their names: any user may start a program called kube-proxy, also with all
    capabilities of a user namespace.
    """
    found = []
    try:
        own = _namespaces(f"{root}/proc/self")
        numbers = [entry for entry in os.listdir(f"{root}/proc") if entry.isdecimal()]
    except OSError:
        return []
    for number in numbers:
        directory = f"{root}/proc/{number}"
        try:
            if _namespaces(directory) != own or not facts.may_change_network(directory):
                continue
            with open(f"{directory}/cmdline", "rb") as stream:
                words = stream.read().decode("utf-8", "replace").split("\0")
        except OSError:
            continue
        arguments = tuple(word for word in words if word)
        comm = (facts.read_text(f"{directory}/comm") or "").strip()
        if arguments:
            found.append(Process(int(number), comm, arguments))
    return found


def _namespaces(directory: str) -> tuple[str, str]:
    """Return the network and the user namespace of a process. Raises OSError."""
    return os.readlink(f"{directory}/ns/net"), os.readlink(f"{directory}/ns/user")


def programs(process: Process) -> list[str]:
    """Return the names that may identify a process: its own, its program's, and the name of a script it runs."""
    program = os.path.basename(process.arguments[0])
    names = [process.name, program]
    if program.startswith("python") and len(process.arguments) > 1:
        names += [os.path.basename(word) for word in process.arguments[1:3]]
    return names


def option(process: Process, name: str) -> str:
    """Return the value of the option ``--name=value``: ``true`` if it has no value, empty text if it is not given."""
    for word in process.arguments:
        option, equals, value = word.lstrip("-").partition("=")
        if word.startswith("--") and option == name:
            return value.lower() if equals else "true"
    return ""


def process_findings(running: Sequence[Process]) -> list[Finding]:
    """Return findings for programs that write the same rules or rewrite the firewall."""
    findings = []
    for process in running:
        names = programs(process)
        where = f"(process {process.number})"
        if "kube-proxy" in names:
            what = f"kube-proxy runs on this node {where} and would revert the changes"
            remedy = "preview and take over with kubenode.proxy.migrate, or stop its unit if it is no DaemonSet"
            findings.append(Finding(KUBE_PROXY, ERROR, what, remedy))
        elif "kube-router" in names and option(process, "run-service-proxy") not in _FALSE:
            what = f"kube-router runs its own service proxy on this node {where}"
            findings.append(Finding(KUBE_ROUTER, ERROR, what, "start it with --run-service-proxy=false"))
        elif _EMBEDDING.intersection(names) and option(process, "disable-kube-proxy") != "true":
            what = f"{process.name} {where} may run its built-in kube-proxy (no --disable-kube-proxy in its arguments)"
            remedy = "set disable-kube-proxy: true in its configuration (ignore this if it is set there)"
            findings.append(Finding(EMBEDDED_KUBE_PROXY, WARNING, what, remedy))
        elif "kubelite" in names:
            what = f"kubelite of MicroK8s {where} contains kube-proxy, which no argument of it disables"
            remedy = "use another distribution on this node (ignore this if your kubelite runs without kube-proxy)"
            findings.append(Finding(EMBEDDED_KUBE_PROXY, WARNING, what, remedy))
        elif "cilium-agent" in names:
            what = f"the Cilium agent runs on this node {where}; with kubeProxyReplacement it serves Services itself"
            remedy = "set kubeProxyReplacement=false, or use no other service proxy"
            findings.append(Finding(CILIUM, WARNING, what, remedy))
        elif "firewalld" in names:
            what = f"firewalld is active {where}; each reload of it drops the rules of other programs"
            remedy = "systemctl disable --now firewalld, or converge again after every firewall-cmd --reload"
            findings.append(Finding(FIREWALLD, WARNING, what, remedy))
    return list(dict.fromkeys(findings))


def service_proxy_findings(root: str = "", standalone: bool = False) -> list[Finding]:
    """Return an error for each other service proxy that runs on this node. Only root can see the programs of all users.

    ``standalone``: another program is to serve the Services (``networkPolicy.standalone``), so it is an error that
    ``migrate`` keeps it off, or that the agent serves them and none runs. Modules, roles, and the units of the agent
    and of the timer check this before they program anything.
    """
    found = process_findings(processes(root))
    if not standalone:
        return [finding for finding in found if finding.severity == ERROR]
    what = "{}, and with networkPolicy.standalone nothing else serves this node's Services"
    if os.path.exists(KEPT_OFF_FILE):
        return [Finding(KEPT_OFF, ERROR, what.format(_KEPT_OFF), f"{_BACK} first")]
    if leaves_services() is False and not possible_proxies(processes(root)):
        return [Finding(KEPT_OFF, ERROR, what.format("no other service proxy runs"), "start it on this node first")]
    return []


def leaves_services(path: str = "") -> Optional[bool]:
    """Return whether Services are left to another program, by the text of a configuration; None without one.

    ``path``: that of the agent if empty. Not every Python on the node can read YAML.
    """
    text = facts.read_text(path or CONFIGURATION_FILE)
    return None if text is None else _STANDALONE.search(text) is not None


def other_rules_findings() -> list[Finding]:
    """Return an error if the rules of Services are not ours, by the configuration of the agent."""
    what = "networkPolicy.standalone leaves this node's Services to another program, whose rules would be lost"
    remedy = "set it here as well (service_proxy_network_policy_standalone)"
    return [Finding(KUBE_PROXY, ERROR, what, remedy)] if leaves_services() else []


def possible_proxies(running: Sequence[Process]) -> list[Finding]:
    """Return findings for each program that serves Services, or may do so: its arguments do not rule it out."""
    return [finding for finding in process_findings(running) if finding.name in _SERVICE_PROXIES]


def removal_findings(running: Sequence[Process], ours: bool = True) -> list[Finding]:
    """Return findings for a node that would lose the rules of kube-proxy, which have the same names as ours.

    That is a node where kube-proxy runs, or is to run by the configuration of its agent; and one that kube-proxy is
    kept off, which nothing would serve. Unless the rules are known to be ``ours``, they may also be those of a program
    that contains kube-proxy.
    """
    what = "kube-proxy runs on this node (process {}), and the rules with which it serves would be removed"
    numbers = [process.number for process in running if "kube-proxy" in programs(process)]
    found = [Finding(KUBE_PROXY, ERROR, what.format(number), f"stop it first, or {_BACK}") for number in numbers]
    if not ours:
        others = [finding for finding in possible_proxies(running) if finding.name != KUBE_PROXY]
        found += [
            finding._replace(severity=ERROR, what=f"{finding.what}; its rules would be lost") for finding in others
        ]
    found += other_rules_findings()
    if os.path.exists(KEPT_OFF_FILE):
        found.append(Finding(KEPT_OFF, ERROR, f"{_KEPT_OFF}, so nothing would serve it", _BACK))
    return found


def ufw_findings(root: str = "") -> list[Finding]:
    """Return a warning if ufw is enabled and does not accept forwarded traffic."""
    enabled = (facts.read_text(f"{root}/etc/ufw/ufw.conf") or "").lower().replace(" ", "")
    if not any(line.startswith("enabled=yes") for line in enabled.splitlines()):
        return []
    defaults = (facts.read_text(f"{root}/etc/default/ufw") or "").replace(" ", "").replace('"', "")
    if any(line.startswith("DEFAULT_FORWARD_POLICY=ACCEPT") for line in defaults.splitlines()):
        return []
    what = "ufw is active and drops forwarded traffic, including that of pods"
    remedy = 'set DEFAULT_FORWARD_POLICY="ACCEPT" in /etc/default/ufw and run ufw reload, or ufw disable'
    return [Finding(UFW, WARNING, what, remedy)]
