#!/usr/bin/python
# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

DOCUMENTATION = r"""
module: fleet_report
short_description: Create an HTML page and a JSON document about all nodes of a cluster
version_added: 1.0.0
author:
  - kubenode.proxy contributors (@kubenode)
description:
  - Creates an HTML page and a JSON document from the results of M(kubenode.proxy.service_proxy_info) on many nodes,
    including nodes that could not be reached or inspected. Problems in the whole cluster come first.
  - The page is a single file that loads nothing else, so that it can be opened locally, mailed or archived.
  - Runs on the controller, as an action plugin, and reads and writes files there. The playbook kubenode.proxy.report
    gathers the results and runs it.
extends_documentation_fragment:
  - kubenode.proxy.attributes.posix
  - kubenode.proxy.attributes
options:
  source:
    description:
      - File with the results, a JSON list with one entry per node. C(name) of an entry is the name of the node,
        C(results) the registered results of the tasks that inspected it, in their order.
      - The first result that is unreachable or failed is reported for the node. If there is none, the last result that
        was not skipped is used as the result of M(kubenode.proxy.service_proxy_info).
    type: path
    required: true
  html_file:
    description: Path of the page to write.
    type: path
  json_file:
    description: Path of the document to write.
    type: path
  previous:
    description:
      - JSON document of an earlier report. The report then shows which nodes have changed since. This may be the file
        of O(json_file), which is read before it is written.
      - Without the file nothing is compared, and if it is not a report there is a warning.
    type: path
  title:
    description: Heading of the page, such as the name of the cluster.
    type: str
    default: Service proxy fleet
  stale_after:
    description:
      - Age in seconds at which the last sync of an agent counts as stale. An agent syncs at least every hour.
    type: float
    default: 7200
attributes:
  check_mode:
    description:
      - Reports whether the files would change, without writing them. They change with each report, because it contains
        the time.
    support: full
  diff_mode:
    description: The page is not meant to be read as text.
    support: none
  idempotent:
    support: none
seealso:
  - module: kubenode.proxy.service_proxy_info
"""

EXAMPLES = r"""
- name: Inspect the nodes
  kubenode.proxy.service_proxy_info:
    snapshot: /var/lib/kubenode-proxy/snapshot.json.gz
  register: inspected
  ignore_errors: true
  ignore_unreachable: true

- name: Write the results to a file
  ansible.builtin.copy:
    content: "{{ [{'name': inventory_hostname, 'results': [inspected]}] | to_json }}"
    dest: /tmp/nodes.json
    mode: "0600"
  delegate_to: localhost

- name: Create the page and the document
  kubenode.proxy.fleet_report:
    source: /tmp/nodes.json
    html_file: /tmp/fleet-report.html
    json_file: /tmp/fleet-report.json
"""

RETURN = r"""
sentence:
  description: The report in one line.
  type: str
  returned: success
  sample: "1000 nodes: 2 unreachable, 5 drifted, 993 fine"
summary:
  description: Counts over the cluster, as C(summary) in the document.
  type: dict
  returned: success
  sample:
    nodes: 3
    states: {unreachable: 0, failed: 0, agent: 0, drifted: 1, unreached: 0, stale: 0, warned: 0, differs: 0, ok: 2}
    modes: {ipvs: 3}
exceptions:
  description: Number of nodes for each kind of exception that occurs.
  type: dict
  returned: success
  sample: {drifted: 1, refused: 3}
html_file:
  description: Path of the page.
  type: str
  returned: O(html_file) is given
  sample: /tmp/fleet-report.html
json_file:
  description: Path of the document.
  type: str
  returned: O(json_file) is given
  sample: /tmp/fleet-report.json
error_kind:
  description: The kind of failure, V(configuration).
  type: str
  returned: failure
  sample: configuration
"""
