#!/usr/bin/python
# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

DOCUMENTATION = r"""
module: cluster_snapshot
short_description: Save the cluster objects that a service proxy needs to a file
version_added: 1.0.0
author:
  - kubenode.proxy contributors (@kubenode)
description:
  - Reads Services, EndpointSlices, Nodes and ServiceCIDRs from an API server, page by page, and writes them to one
    file for O(kubenode.proxy.service_proxy#module:snapshot) of M(kubenode.proxy.service_proxy).
  - Run it once, on the controller or on one node, and copy the file to the nodes.
  - Fields that change constantly and that a service proxy does not need, such as the heartbeats of the nodes, are
    omitted, so that an unchanged cluster produces an unchanged file.
extends_documentation_fragment:
  - kubenode.proxy.attributes.posix
  - kubenode.proxy.attributes.api
  - kubenode.proxy.attributes
  - kubenode.proxy.kubernetes_api
options:
  snapshot_file:
    description:
      - Path of the file to write. It is JSON, compressed with gzip if the name ends in C(.gz).
      - The file is replaced atomically, and only if its content differs. Its directory must exist.
    type: path
    required: true
  source_file:
    description:
      - Path of another snapshot to read instead of an API server, for example the output of
        C(kubectl get services,endpointslices,nodes -A -o json). It is converted to the same compact, sorted form.
    type: path
  mode:
    description:
      - Permissions of the file, in the format of M(ansible.builtin.copy). If not given, a new file gets V(0600), and an
        existing file keeps its permissions.
    type: raw
  owner:
    description: Name of the user that should own the file.
    type: str
  group:
    description: Name of the group that should own the file.
    type: str
  diff_lines:
    description: Maximum number of object names that a diff shows on each side. V(0) shows all.
    type: int
    default: 200
  outside_hosts:
    description: Whether the snapshot is for hosts outside the cluster only. It need not contain any Node then.
    type: bool
    default: false
  network_policies:
    description:
      - Whether the snapshot must contain Pods, Namespaces and NetworkPolicies, for nodes that enforce them.
      - Of Pods only the fields are kept that policies depend on.
      - The account then needs the right to list them in all namespaces.
    type: bool
    default: false
    version_added: 1.0.0
  cluster_network_policies:
    description:
      - Whether the snapshot must contain ClusterNetworkPolicies as well, if O(network_policies=true).
      - A cluster that does not know them has none.
    type: bool
    default: false
    version_added: 1.0.0
  ignore_findings:
    description:
      - Names of findings to ignore, as for O(kubenode.proxy.service_proxy#module:ignore_findings). A cluster state
        without any Service, EndpointSlice or Node is refused with the finding V(incomplete-snapshot).
    type: list
    elements: str
    default: []
attributes:
  check_mode:
    description: Reads from the API server and reports whether the file would change, without writing it.
    support: full
  diff_mode:
    description: Returns the names of the objects that differ.
    support: full
requirements:
  - the Python package kubernetes, only for a kubeconfig with an C(auth-provider)
  - the Python package PyYAML, only if the kubeconfig or O(source_file) is in YAML
seealso:
  - module: kubenode.proxy.service_proxy
"""

EXAMPLES = r"""
- name: Read the cluster state once, on the controller
  kubenode.proxy.cluster_snapshot:
    kubeconfig: ~/.kube/config
    snapshot_file: /tmp/cluster.json.gz
  delegate_to: localhost
  run_once: true

- name: Convert the output of kubectl to the form that is copied to the nodes
  kubenode.proxy.cluster_snapshot:
    source_file: cluster.json
    snapshot_file: cluster.json.gz
"""

RETURN = r"""
snapshot_file:
  description: Path of the file.
  type: str
  returned: success
  sample: /tmp/cluster.json.gz
digest:
  description: SHA-256 of the uncompressed content.
  type: str
  returned: success
  sample: 4be0c6d2c1b7b0ad0f3c0b3a2c0f4d40d3a0a7c5d2a1f6c58c1d8f1f0a2f2b3c
size_bytes:
  description: Size of the file in bytes.
  type: int
  returned: the file exists
  sample: 20480
counts:
  description: Number of objects of each kind that were read.
  type: dict
  returned: success
  sample: {Service: 12, EndpointSlice: 14, Node: 3, ServiceCIDR: 1}
error_kind:
  description: The kind of failure, one of V(snapshot), V(api), V(configuration) or V(preflight).
  type: str
  returned: failure
  sample: api
"""

import os
from typing import Any

from ansible.module_utils.basic import AnsibleModule

# pylint: disable-next=unused-import
import ansible_collections.kubenode.proxy.plugins.module_utils.module_support.supported_python  # noqa: F401
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.files.snapshot import read_snapshot, write_snapshot
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.parsing.objects import is_supported, object_key
from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.node_proxy import NetworkPolicySettings
from ansible_collections.kubenode.proxy.plugins.module_utils.module_support.arguments import API_SOURCES, api_spec
from ansible_collections.kubenode.proxy.plugins.module_utils.module_support.execution import run
from ansible_collections.kubenode.proxy.plugins.module_utils.module_support.snapshots import snapshot_difference
from ansible_collections.kubenode.proxy.plugins.module_utils.module_support.sources import read_cluster_objects
from ansible_collections.kubenode.proxy.plugins.module_utils.module_support.tables import difference_entry
from ansible_collections.kubenode.proxy.plugins.module_utils.preflight.cluster_state import completeness_findings
from ansible_collections.kubenode.proxy.plugins.module_utils.preflight.findings import judge


def snapshot(module: AnsibleModule) -> dict[str, Any]:
    """Read the cluster, write the file if its content differs, and return the result."""
    path, source = module.params["snapshot_file"], module.params["source_file"]
    policies, cluster_policies = module.params["network_policies"], module.params["cluster_network_policies"]
    others = NetworkPolicySettings(enabled=policies, cluster_policies=cluster_policies).resources
    objects = read_snapshot(source) if source else read_cluster_objects(module, others)
    kinds = {object_key(raw).kind for raw in objects if is_supported(raw)}
    findings = completeness_findings(kinds, module.params["outside_hosts"], policies=policies)
    for warning in judge(findings, module.params["ignore_findings"]):
        module.warn(warning)
    result: dict[str, Any] = {"snapshot_file": path}
    if module._diff:
        before, after = snapshot_difference(path, objects)
        if before or after:
            result["diff"] = [difference_entry(path, before, after, module.params["diff_lines"])]
    written = write_snapshot(path, objects, check_mode=module.check_mode)
    changed = written.changed
    if os.path.exists(path):
        attributes = module.load_file_common_arguments({**module.params, "path": path})
        changed = module.set_fs_attributes_if_different(attributes, changed)
        result["size_bytes"] = os.path.getsize(path)
    return {**result, "changed": changed, "digest": written.digest, "counts": written.counts}


_OPTIONS = {
    "snapshot_file": {"type": "path", "required": True},
    "source_file": {"type": "path"},
    "mode": {"type": "raw"},
    "owner": {"type": "str"},
    "group": {"type": "str"},
    "diff_lines": {"type": "int", "default": 200},
    "outside_hosts": {"type": "bool", "default": False},
    "network_policies": {"type": "bool", "default": False},
    "cluster_network_policies": {"type": "bool", "default": False},
    "ignore_findings": {"type": "list", "elements": "str", "default": []},
    **api_spec(),
}


def main() -> None:
    """Run the module."""
    run(snapshot, _OPTIONS, mutually_exclusive=[("source_file", option) for option in API_SOURCES])


if __name__ == "__main__":
    main()
