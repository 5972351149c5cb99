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
  - Kubelets report the addresses and most labels of their own Nodes. What identifies a host to Ansible is its ssh host
    key, so check host keys, and select by labels that kubelets cannot set, such as those with the prefix
    C(node-restriction.kubernetes.io/), where that matters.
  - A Node that cannot be used, or that has the name of a group, is skipped with a warning; a group of O(keyed_groups)
    that has the name of a host is skipped, too. It is an error if the cluster has Nodes but none can be used.
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
      - Types of addresses of a Node, the preferred one first. The first address of the first type that the Node has
        becomes C(ansible_host).
      - With an empty list, or for a Node without such an address, C(ansible_host) is not set, so that Ansible connects
        to the name of the host.
    type: list
    elements: str
    choices: [InternalIP, ExternalIP, Hostname, InternalDNS, ExternalDNS]
    default: [InternalIP, ExternalIP, Hostname]
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
from typing import Any, Dict, List, Set

from ansible.errors import AnsibleParserError
from ansible.plugins.inventory import BaseInventoryPlugin, Cacheable, Constructable
from ansible.utils.unsafe_proxy import wrap_var

from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.api import ApiClient
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.fields import Invalid
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.parsing.objects import object_key
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.resource_types import NODES
from ansible_collections.kubenode.proxy.plugins.module_utils.controller.node_hosts import NodeHost, node_host
from ansible_collections.kubenode.proxy.plugins.module_utils.errors import ProxyError, Refusal
from ansible_collections.kubenode.proxy.plugins.module_utils.module_support.arguments import API_OPTIONS, api_connection

_SUFFIXES = ("nodes.yml", "nodes.yaml")


def untemplated(value: Any) -> Any:
    """Return a value of the cluster in which no string can be a template; Ansible would evaluate one."""
    if isinstance(value, dict):
        return {untemplated(key): untemplated(item) for key, item in value.items()}
    if isinstance(value, list):
        return [untemplated(item) for item in value]
    # Other strings are not marked: ansible-inventory would print each of them as an object.
    return wrap_var(value) if isinstance(value, str) and "{" in value else value


class _KeyedInventory:
    """The inventory without the names of hosts as names of groups, which make the hosts ambiguous.

    Labels, of which keyed groups are made, are less trustworthy than names of Nodes, so such a group is skipped.
    """

    def __init__(self, inventory: Any, display: Any) -> None:
        self._inventory = inventory
        self._display = display

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inventory, name)

    def add_group(self, group: str) -> str:
        """Add a group, unless a host has its name; return its name."""
        if group in self._inventory.hosts:
            self._display.warning(f"skipped the keyed group {group}: it is the name of a host")
            return group
        return str(self._inventory.add_group(group))

    def add_host(self, host: str, group: str) -> None:
        """Add a host to a group that was not skipped."""
        if group not in self._inventory.hosts:
            self._inventory.add_host(host, group)

    def add_child(self, group: str, child: str) -> None:
        """Add a group to a group, if neither was skipped."""
        if group not in self._inventory.hosts and child not in self._inventory.hosts:
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
        group = self.inventory.add_group(self._sanitize_group_name(self.get_option("group")))
        taken = self._group_names(hosts)
        added: Dict[str, Dict[str, Any]] = {}
        for host in hosts:
            if host.name in taken:
                # Ansible would put the group in place of the host into other groups, or refuse the whole inventory.
                reason = f"{host.name} is the name of a group"
                self.display.warning(f"skipped {Refusal(NODES.kind, '', host.name, 'metadata.name', reason)}")
            else:
                added[host.name] = self._add(host, group)
        self._add_keyed_groups(added)

    def _add_keyed_groups(self, hosts: Dict[str, Dict[str, Any]]) -> None:
        """Add keyed groups once all hosts are known; ``hosts``: variables by name."""
        inventory, self.inventory = self.inventory, _KeyedInventory(self.inventory, self.display)
        try:
            for name, variables in hosts.items():
                strict = self.get_option("strict")
                self._add_host_to_keyed_groups(self.get_option("keyed_groups"), variables, name, strict=strict)
        finally:
            self.inventory = inventory

    def _group_names(self, hosts: List[NodeHost]) -> Set[str]:
        """Return the names of the groups of these hosts and of those that exist; keyed groups are not known yet."""
        names = {*self.inventory.groups, *(self.get_option("groups") or ())}
        return names | {self._sanitize_group_name(found) for host in hosts for found in host.groups}

    def _hosts(self, path: str, cache: bool) -> List[NodeHost]:
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

    def _read(self) -> List[NodeHost]:
        """Return the hosts of all Nodes that can be used. Raises ProxyError."""
        connection = api_connection({name: self.get_option(name) for name in API_OPTIONS}, os.environ)
        nodes = NODES._replace(label_selector=self.get_option("label_selector"))
        with contextlib.closing(ApiClient(connection, self.get_option("api_timeout"))) as client:
            for warning in client.warnings:
                self.display.warning(warning)
            items = client.list(nodes).items
        hosts: Dict[str, NodeHost] = {}
        for raw in items:
            try:
                host = node_host(raw)
            except Invalid as error:
                refusal = Refusal(NODES.kind, "", object_key(raw).name, error.field, error.reason)
                self.display.warning(f"skipped {refusal}")
            else:
                hosts[host.name] = host
        if items and not hosts:
            raise ProxyError(f"none of the {len(items)} Nodes of the cluster can be used")
        return [hosts[name] for name in sorted(hosts)]

    def _add(self, host: NodeHost, group: str) -> Dict[str, Any]:
        """Add a host with its variables, which are returned, to all groups but keyed ones."""
        name = self.inventory.add_host(host.name, group=group)
        variables: Dict[str, Any] = untemplated(host.variables)
        address = host.address(self.get_option("address_types"))
        if address:
            variables["ansible_host"] = address
        for key, value in variables.items():
            self.inventory.set_variable(name, key, value)
        for found in host.groups:
            self.inventory.add_child(self.inventory.add_group(self._sanitize_group_name(found)), name)
        strict = self.get_option("strict")
        self._set_composite_vars(self.get_option("compose"), variables, name, strict=strict)
        self._add_host_to_composed_groups(self.get_option("groups"), variables, name, strict=strict)
        return variables
