# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Inventory of the Nodes of a cluster."""

from __future__ import annotations

DOCUMENTATION = r"""
name: nodes
short_description: Nodes of a Kubernetes cluster as hosts
version_added: 1.0.0
author:
  - kubenode.proxy contributors (@kubenode)
description:
  - Reads the Nodes of a cluster from its API server and lists each as a host, with the name of the Node.
  - All hosts are in the group that O(group) names. They are also in the groups C(ready) or C(not_ready), by the
    condition C(Ready); C(unschedulable) if they are cordoned; C(role_NAME) for each label
    C(node-role.kubernetes.io/NAME); and C(zone_NAME) by the label C(topology.kubernetes.io/zone). In names of groups,
    characters other than letters, digits and underscores become underscores.
  - The variables of a host begin with C(kubernetes_node_). They are C(name), C(addresses) (lists of addresses by type),
    C(labels), C(roles), C(zone), C(region), C(ready), C(schedulable), C(taints), C(pod_cidrs), and C(info) (versions of
    kernel, kubelet, container runtime and operating system, and the architecture). Their values are data and never
    templates.
  - The configuration is a YAML file whose name ends with C(nodes.yml) or C(nodes.yaml).
  - The API server must permit to list Nodes. No Python package is needed but PyYAML, which Ansible itself needs.
notes:
  - Kubelets report the addresses and most labels of their own Nodes. An address that is also one of another Node, or of
    a host of an earlier source, is not connected to, with a warning. What else identifies a host to Ansible is its ssh
    host key, so check host keys, and select by labels that kubelets cannot set, such as those with the prefix
    C(node-restriction.kubernetes.io/), where that matters.
  - A Node that cannot be used is skipped with a warning. So is one whose name means something else to Ansible, which
    would widen C(--limit) or take over tasks that are delegated to the controller - a group, C(localhost) and other
    names and addresses of the controller itself, a host of an earlier source (see O(merge_hosts)), and an address of
    another Node or host.
  - A group made of what Nodes report, which is any but O(group) and those of O(groups), is skipped with a warning if it
    has the name of a host, of another group of this configuration, or of a group of an earlier source (see
    O(merge_groups)), unless that source is one of this plugin, too.
  - Name the configuration so that it is read after other sources, which Ansible reads in alphabetical order in a
    directory. Ansible itself merges hosts and groups of later sources without asking.
  - It is an error if the cluster has Nodes but none can be used.
extends_documentation_fragment:
  - constructed
  - inventory_cache
  - kubenode.proxy.kubernetes_api
options:
  plugin:
    description: The name of this plugin.
    type: str
    required: true
    choices: [kubenode.proxy.nodes]
  group:
    description:
      - Name of the group of all hosts. The playbooks of the collection run on the default one.
    type: str
    default: k8s_cluster
  label_selector:
    description:
      - List only Nodes with these labels, as C(kubectl get nodes --selector) does. For example
        V(!node-role.kubernetes.io/control-plane) for all Nodes but those of the control plane.
    type: str
    default: ''
  address_types:
    description:
      - Types of addresses of a Node, the preferred one first. The first address by types that only this Node has
        becomes C(ansible_host).
      - With an empty list, or for a Node without such an address, C(ansible_host) is not set, so that Ansible connects
        to the name of the host.
    type: list
    elements: str
    choices: [InternalIP, ExternalIP, Hostname, InternalDNS, ExternalDNS]
    default: [InternalIP, ExternalIP, Hostname]
  merge_hosts:
    description:
      - Whether a Node may have the name of a host of an earlier source of the inventory, to whose variables and groups
        those of the Node are then added. Such a Node is skipped otherwise, since a user who may register Nodes chooses
        their names.
    type: bool
    default: false
  merge_groups:
    description:
      - Groups of earlier sources of the inventory that Nodes may join by their labels or conditions, by the names that
        the groups have in the inventory.
      - Not needed for O(group), for groups in O(groups) and for parent groups, which the configuration names.
    type: list
    elements: str
    default: []
seealso:
  - module: kubenode.proxy.cluster_snapshot
"""

EXAMPLES = r"""
# nodes.yml: all Nodes of the cluster of the current context, in the group k8s_cluster
plugin: kubenode.proxy.nodes
---
# production.nodes.yml: workers, reached by their external addresses
plugin: kubenode.proxy.nodes
kubeconfig: ~/.kube/production
context: admin
label_selector: "!node-role.kubernetes.io/control-plane"
address_types: [ExternalIP, InternalIP]
compose:
  ansible_user: "'core' if 'Flatcar' in kubernetes_node_info.osImage else 'root'"
  service_proxy_mode: kubernetes_node_labels['example.com/proxy-mode'] | default('nftables')
groups:
  arm: kubernetes_node_info.architecture == 'arm64'
keyed_groups:
  # type_m5_large and others, by the value of one label
  - prefix: type
    key: kubernetes_node_labels['node.kubernetes.io/instance-type'] | default('unknown')
  # label_LABEL_VALUE, for each label
  - prefix: label
    key: kubernetes_node_labels
cache: true
cache_plugin: ansible.builtin.jsonfile
cache_connection: ~/.cache/kubenode-inventory
cache_timeout: 300
"""

import contextlib
import hashlib
import os
import weakref
from typing import Any, Collection, Iterable, Mapping, MutableSet

from ansible.errors import AnsibleParserError
from ansible.plugins.inventory import BaseInventoryPlugin, Cacheable, Constructable
from ansible.utils.unsafe_proxy import wrap_var

from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import ProxyError, Refusal
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.api.client import ApiClient
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.api.resource_types import NODES
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.fields import Invalid
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.parsing.objects import object_key
from ansible_collections.kubenode.proxy.plugins.module_utils.controller import border
from ansible_collections.kubenode.proxy.plugins.module_utils.controller.node_hosts import (
    NodeHost,
    node_host,
    with_shared_addresses,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.module_support.arguments import API_OPTIONS, api_connection

_SUFFIXES = ("nodes.yml", "nodes.yaml")


#: The hosts of sources of this plugin, and the groups made of what Nodes report, which several clusters may share.
_MADE: MutableSet[Any] = weakref.WeakSet()


class _ReportedGroups:
    """The inventory for groups that are made of what Nodes report: such a group means only that, or it is not made.

    Kubelets set most labels of their Nodes. A group with the name of a host, of a group that the configuration has, or
    of a group of an earlier source, on which other plays run, is skipped with a warning. ``kind``: what to call it;
    ``own``: groups that the configuration has; ``parents``: those to which groups are added; ``merge``: groups of
    earlier sources that Nodes may join.
    """

    def __init__(
        self,
        inventory: Any,
        display: Any,
        kind: str,
        *,
        own: Collection[str],
        merge: Collection[str],
        parents: Collection[str] = (),
    ) -> None:
        self._inventory = inventory
        self._display = display
        self._kind = kind
        self._own = (*border.GROUPS_OF_ANSIBLE, *own)
        self._parents = parents
        self._earlier = {name for name, group in inventory.groups.items() if group not in _MADE}.difference(merge)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inventory, name)

    def _refusal(self, group: str) -> str:
        """Return what else the name of a group means, empty if nothing."""
        if group in self._inventory.hosts:
            return "the name of a host"
        if group in self._own or group in self._parents:
            return "the name of another group"
        return "a group of an earlier source (see merge_groups)" if group in self._earlier else ""

    def _is_parent(self, group: str) -> bool:
        return group in self._parents and group not in self._inventory.hosts

    def add_group(self, group: str) -> str:
        """Add a group unless its name means something else; return its name."""
        if self._is_parent(group):
            return str(self._inventory.add_group(group))
        if self._is_refused(group):
            return group
        name = str(self._inventory.add_group(group))
        _MADE.add(self._inventory.groups[name])
        return name

    def _is_refused(self, group: str) -> bool:
        """Return whether a group is skipped, and show a warning if it is; Ansible shows equal ones once."""
        refusal = self._refusal(group)
        if refusal:
            self._display.warning(f"skipped the {self._kind} {group}: it is {refusal}")
        return bool(refusal)

    def add_host(self, host: str, group: str) -> None:
        """Add a host to a group that was not skipped."""
        if not self._is_refused(group):
            self._inventory.add_host(host, group)

    def add_child(self, group: str, child: str) -> None:
        """Add a group to a group, if neither was skipped."""
        if not self._refusal(child) and (self._is_parent(group) or not self._refusal(group)):
            self._inventory.add_child(group, child)


class InventoryModule(BaseInventoryPlugin, Constructable, Cacheable):
    """The inventory: hosts from the cache or the API server, their groups, and what the configuration adds."""

    NAME = "kubenode.proxy.nodes"

    def verify_file(self, path: str) -> bool:
        """Return whether the path may be a configuration of this plugin."""
        return bool(super().verify_file(path)) and path.endswith(_SUFFIXES)

    def parse(self, inventory: Any, loader: Any, path: str, cache: bool = True) -> None:
        """Add the Nodes of the cluster to the inventory."""
        super().parse(inventory, loader, path)
        self._read_config_data(path)
        try:
            hosts = self._hosts(path, cache)
        except ProxyError as error:
            raise AnsibleParserError(f"{path}: {error}") from error
        group = self._sanitize_group_name(self.get_option("group"))
        parents = self._names(
            entry["parent_group"] for entry in self.get_option("keyed_groups") if entry.get("parent_group")
        )
        own = {group, *self._names(self.get_option("groups") or ())}
        reported = self._names(found for host in hosts for found in host.groups)
        merge = self.get_option("merge_groups")
        taken = {*self.inventory.groups, *own, *reported}
        others = self._earlier_addresses()
        usable = [host for host in hosts if self._is_usable(host, taken, others)]
        groups = _ReportedGroups(self.inventory, self.display, "group", own=own, merge=merge)
        self.inventory.add_group(group)
        for host in usable:
            self.inventory.add_host(host.name, group=group)
            _MADE.add(self.inventory.hosts[host.name])
        added = {host.name: self._complete(host, groups, others) for host in usable}
        own.update(reported, border.GROUPS_OF_NODES)
        keyed = _ReportedGroups(self.inventory, self.display, "keyed group", own=own, merge=merge, parents=parents)
        self._add_keyed_groups(added, keyed)

    def _names(self, groups: Iterable[str]) -> set[str]:
        return {self._sanitize_group_name(name) for name in groups}

    def _earlier_addresses(self) -> dict[str, str]:
        """Return the names of hosts of other sources, except of this plugin, by where Ansible finds them."""
        return {
            border.canonical_host(str(host.vars.get("ansible_host", name))): name
            for name, host in self.inventory.hosts.items()
            if host not in _MADE
        }

    def _is_usable(self, host: NodeHost, groups: Collection[str], others: Mapping[str, str]) -> bool:
        """Return whether the name of a Node means nothing else to Ansible, and show a warning if it does."""
        name = host.name
        meaning = border.other_meaning(name)
        if name in groups:
            # Ansible would put the group in place of the host into other groups, or refuse the whole inventory.
            meaning = "the name of a group"
        elif name in self.inventory.hosts and not self.get_option("merge_hosts"):
            meaning = meaning or "a host of an earlier source (see merge_hosts)"
        if border.is_address(name) and (
            border.canonical_host(name) in host.shared or others.get(border.canonical_host(name), name) != name
        ):
            meaning = meaning or "an address of another Node or host"
        if meaning:
            refusal = Refusal(NODES.kind, "", name, "metadata.name", f"{name} is {meaning}")
            self.display.warning(f"skipped {refusal}")
        return not meaning

    def _add_keyed_groups(self, hosts: Mapping[str, dict[str, Any]], groups: _ReportedGroups) -> None:
        """Add keyed groups once all hosts and other groups are known; ``hosts``: variables by name."""
        inventory, self.inventory = self.inventory, groups
        try:
            for name, variables in hosts.items():
                strict = self.get_option("strict")
                self._add_host_to_keyed_groups(self.get_option("keyed_groups"), variables, name, strict=strict)
        finally:
            self.inventory = inventory

    def _hosts(self, path: str, cache: bool) -> list[NodeHost]:
        """Return the hosts from the cache if it may be used and has them; otherwise read them. Raises ProxyError."""
        if not self.get_option("cache"):
            return self._read()
        key = self._key(path)
        if cache and key in self._cache:
            return [NodeHost(*item) for item in self._cache[key]]
        hosts = self._read()
        self._cache[key] = [list(host) for host in hosts]
        return hosts

    def _key(self, path: str) -> str:
        """Return the key of the cache: different for another file, API server, user or selector."""
        options = [str(self.get_option(name)) for name in (*API_OPTIONS, "label_selector")]
        digest = hashlib.sha256("\0".join(options).encode()).hexdigest()[:12]
        return f"{self.get_cache_key(path)}_{digest}"

    def _read(self) -> list[NodeHost]:
        """Return the hosts of all Nodes that can be used. Raises ProxyError."""
        connection = api_connection({name: self.get_option(name) for name in API_OPTIONS}, os.environ)
        with contextlib.closing(ApiClient(connection, self.get_option("api_timeout"))) as client:
            for warning in client.warnings:
                self.display.warning(warning)
            # Also those that are not selected: they keep their addresses.
            items = client.list(NODES).items
            selector = self.get_option("label_selector")
            selected = client.list(NODES._replace(label_selector=selector)).items if selector else items
        hosts: dict[str, NodeHost] = {}
        for raw in items:
            try:
                host = node_host(raw)
            except Invalid as error:
                refusal = Refusal(NODES.kind, "", object_key(raw).name, error.field, error.reason)
                self.display.warning(f"skipped {refusal}")
            else:
                hosts[host.name] = host
        names = {object_key(raw).name for raw in selected}
        found = [host for host in with_shared_addresses(hosts.values()) if host.name in names]
        if selected and not found:
            raise ProxyError(f"none of the {len(selected)} Nodes of the cluster can be used")
        return sorted(found)

    def _complete(self, host: NodeHost, groups: _ReportedGroups, others: Mapping[str, str]) -> dict[str, Any]:
        """Give a host its variables, which are returned, and add it to all groups but keyed ones."""
        name = host.name
        # All strings, and keys: a template could also be made of several.
        variables: dict[str, Any] = wrap_var(host.variables)
        types = self.get_option("address_types")
        shared = {*host.shared, *(address for address, owner in others.items() if owner != name)}
        address, preferred = (host._replace(shared=found).address(types) for found in (shared, ()))
        if address != preferred:
            self.display.warning(f"skipped the address {preferred} of Node {name}: another Node or host has it, too")
        if address:
            variables["ansible_host"] = address
        for key, value in variables.items():
            self.inventory.set_variable(name, key, value)
        for found in host.groups:
            groups.add_host(name, groups.add_group(self._sanitize_group_name(found)))
        strict = self.get_option("strict")
        self._set_composite_vars(self.get_option("compose"), variables, name, strict=strict)
        self._add_host_to_composed_groups(self.get_option("groups"), variables, name, strict=strict)
        return variables
