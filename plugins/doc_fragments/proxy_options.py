# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Options shared by the modules that converge and inspect a node."""

from __future__ import annotations


class ModuleDocFragment:
    """Document the source of the cluster state and the proxy's settings (``kubenode.proxy.proxy_options``)."""

    DOCUMENTATION = r"""
options:
  snapshot:
    description:
      - Path of a snapshot file on the node with Services, EndpointSlices, Nodes and ServiceCIDRs, as
        M(kubenode.proxy.cluster_snapshot) writes it or as C(kubectl get services,endpointslices,nodes -A -o json)
        prints it.
      - JSON or YAML, one list, several documents, or a list of lists, plain or compressed with gzip. YAML needs
        PyYAML on the node.
    type: path
  cluster_state:
    description:
      - The objects themselves. Suitable for a handful of objects only, because Ansible spends more than a second per
        megabyte and host on such an option; use O(snapshot) for a real cluster.
    type: list
    elements: dict
  mode:
    description:
      - The proxy mode. V(auto) selects the first of nftables, ipvs and iptables that the node can run.
      - In mode V(userspace) the agent forwards the connections itself, so this module can only check it.
      - Defaults to the mode in the configuration, and to iptables if the configuration has none.
    type: str
    choices: [auto, iptables, ipvs, nftables, userspace]
  node_name:
    description:
      - Name of this node's Node object. It identifies the node's endpoints, zone and addresses.
      - Defaults to C(hostnameOverride) of the configuration, or else to the host name in lower case.
    type: str
  config:
    description:
      - Path on the node of a KubeProxyConfiguration file, C(kubeproxy.config.k8s.io/v1alpha1). A second document of
        the file may be a NodeProxyConfiguration, C(kubenode.proxy/v1alpha1). YAML needs PyYAML on the node.
    type: path
  configuration:
    description:
      - A KubeProxyConfiguration as data. C(apiVersion) and C(kind) are optional. Missing fields have kube-proxy's
        defaults.
    type: dict
  node_configuration:
    description:
      - A NodeProxyConfiguration, C(kubenode.proxy/v1alpha1), as data, with settings that kube-proxy does not have.
        C(apiVersion) and C(kind) are optional. It replaces the one in the file O(config).
    type: dict
  static_services:
    description:
      - Service and EndpointSlice manifests that are served in addition to those of the cluster. They replace the file
        C(ansible.json), which the roles write, in the directory of static Services (C(staticServices.directory) of the
        NodeProxyConfiguration); the other files of that directory are read as well.
      - An object without a namespace is in the namespace V(static). A manifest that cannot be used is reported like an
        invalid object of the cluster, with its file.
    type: list
    elements: dict
  fallback:
    description:
      - What to do if mode V(ipvs) is requested and the kernel has no IPVS. Without this option that is an error.
      - V(iptables) uses iptables mode instead and returns a warning.
    type: str
    choices: [iptables]
  ignore_findings:
    description:
      - Names of preflight findings to ignore, for example V(firewalld). The message of a finding contains its name.
      - V(incomplete-snapshot) is a cluster state without any Service, EndpointSlice or Node, V(node) a host without a
        Node object, and V(loss) a change that would leave most Services without endpoints.
    type: list
    elements: str
    default: []
  outside_host:
    description:
      - Whether the host is outside the cluster. Such a host needs no Node object, and no endpoint is local to it.
    type: bool
    default: false
"""
