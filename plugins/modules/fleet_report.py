#!/usr/bin/python
# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: fleet_report
short_description: Make one page, and one document, of what all nodes of a cluster tell of themselves
version_added: 0.1.0
author:
  - kubenode.proxy contributors (@kubenode)
description:
  - Makes an HTML page and a JSON document from the results of M(kubenode.proxy.service_proxy_info) of many nodes, those
    that could not be reached or looked at included. The exceptions of the whole cluster come first.
  - The page is one file that loads nothing, so that it can be opened from a disk, sent by mail or kept.
  - Runs where the results are, on the controller. The playbook kubenode.proxy.report gathers them and calls it.
extends_documentation_fragment:
  - kubenode.proxy.attributes.posix
  - kubenode.proxy.attributes
options:
  source:
    description:
      - File with the results, a JSON list with one entry per node. C(name) of an entry is that of the node, C(results)
        the registered results of the tasks that looked at it, in their order.
      - The first result that is unreachable or failed is the reason given for the node; else the last that was not
        skipped is taken to be that of M(kubenode.proxy.service_proxy_info).
    type: path
    required: true
  html_file:
    description: Path of the page to write.
    type: path
  json_file:
    description: Path of the document to write.
    type: path
  title:
    description: Heading of the page, such as the name of the cluster.
    type: str
    default: Service proxy fleet
  engine:
    description:
      - Directory C(plugins/module_utils) of the collection, to tell nodes whose agent is of another version.
      - The version of the collection is read from the files two directories above it.
    type: path
  stale_after:
    description:
      - Seconds after which the last sync of an agent is long ago. An agent syncs at least every hour, whatever happens.
    type: float
    default: 7200
attributes:
  check_mode:
    description: Tells whether the files would change, without writing them. They do with each report, as it has a time.
    support: full
  diff_mode:
    description: The page is not for reading as text.
    support: none
  idempotent:
    support: none
seealso:
  - module: kubenode.proxy.service_proxy_info
"""

EXAMPLES = r"""
- name: Look at the nodes
  kubenode.proxy.service_proxy_info:
    snapshot: /var/lib/kubenode-proxy/snapshot.json.gz
  register: looked
  ignore_errors: true
  ignore_unreachable: true

- name: Keep what they tell
  ansible.builtin.copy:
    content: "{{ [{'name': inventory_hostname, 'results': [looked]}] | to_json }}"
    dest: /tmp/nodes.json
    mode: "0600"
  delegate_to: localhost

- name: Make a page of it
  kubenode.proxy.fleet_report:
    source: /tmp/nodes.json
    html_file: /tmp/fleet-report.html
    json_file: /tmp/fleet-report.json
  delegate_to: localhost
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
    states: {unreachable: 0, failed: 0, agent: 0, drifted: 1, stale: 0, warned: 0, differs: 0, ok: 2}
    modes: {ipvs: 3}
exceptions:
  description: Number of nodes for each kind of exception that there is.
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

import time
from typing import Any, Dict

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.kubenode.proxy.plugins.module_utils.controller.fleet.document import (
    About,
    document_text,
    make_report,
    one_sentence,
    summary,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.controller.fleet.nodes import read_nodes
from ansible_collections.kubenode.proxy.plugins.module_utils.controller.fleet.page import page
from ansible_collections.kubenode.proxy.plugins.module_utils.controller.fleet.sources import read_entries
from ansible_collections.kubenode.proxy.plugins.module_utils.module_support.binary_files import replace_file
from ansible_collections.kubenode.proxy.plugins.module_utils.module_support.execution import run
from ansible_collections.kubenode.proxy.plugins.module_utils.packaging.identity import (
    collection_version,
    source_identity,
)


def reported(module: AnsibleModule) -> Dict[str, Any]:
    """Read the results, write what is asked for, and return the summary."""
    options = module.params
    nodes = read_nodes(read_entries(options["source"]))
    engine = options["engine"]
    about = About(
        generated=time.time(),
        title=options["title"],
        collection_version=collection_version(engine) if engine else "",
        engine=source_identity(engine).text if engine else "",
        stale_after=options["stale_after"],
    )
    report = make_report(nodes, about)
    result: Dict[str, Any] = {
        "changed": False,
        "sentence": one_sentence(report),
        "summary": summary(report),
        "exceptions": {found.kind: found.nodes for found in report.exceptions},
    }
    for option, write in (("html_file", page), ("json_file", document_text)):
        path = options[option]
        if path is not None:
            changed = replace_file(path, write(report).encode("utf-8"), check=module.check_mode)
            result["changed"] = result["changed"] or changed
            result[option] = path
    return result


def main() -> None:
    """The module."""
    module = AnsibleModule(
        argument_spec={
            "source": {"type": "path", "required": True},
            "html_file": {"type": "path"},
            "json_file": {"type": "path"},
            "title": {"type": "str", "default": "Service proxy fleet"},
            "engine": {"type": "path"},
            "stale_after": {"type": "float", "default": 7200.0},
        },
        supports_check_mode=True,
    )
    run(module, reported)


if __name__ == "__main__":
    main()
