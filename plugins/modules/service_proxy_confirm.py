#!/usr/bin/python
# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: service_proxy_confirm
short_description: Keep a change of the service proxy, once probes have succeeded
version_added: 0.1.0
author:
  - kubenode.proxy contributors (@kubenode)
description:
  - With O(kubenode.proxy.service_proxy#module:confirm_timeout), M(kubenode.proxy.service_proxy) makes a change that the
    node takes back by itself unless this module is run in time.
  - The probes run on the node. If one of them fails, the change is not confirmed, and the node goes back when its time
    is up.
  - Run it over a fresh connection, after the meta task C(reset_connection). Then the confirmation itself proves that
    the node can still be reached. The role P(kubenode.proxy.service_proxy#role) does all of this.
extends_documentation_fragment:
  - kubenode.proxy.attributes
  - kubenode.proxy.history_options
options:
  state:
    description:
      - Number of the state that was saved before the change, RV(kubenode.proxy.service_proxy#module:saved_state). It is
        an error if the change after it is not there any more, because the node has gone back already or was rebooted.
      - Without it, whatever change waits is confirmed, and it is fine if none does.
    type: int
  probes:
    description:
      - What has to answer, each as a URL. V(tcp://10.96.0.1:443) accepts a connection, V(udp://10.96.0.5:514) sends
        something back, V(http://10.96.0.7/ready) (or V(https), whose certificate is not checked) answers with a status
        below 400, V(dns://10.96.0.10/kubernetes.default.svc.cluster.local) answers the question.
      - RV(kubenode.proxy.service_proxy#module:probes) has those of the API server and of the cluster's DNS.
    type: list
    elements: str
    default: []
  probe_timeout:
    description:
      - Seconds within which all probes have to succeed. They are repeated until then.
    type: float
    default: 15.0
attributes:
  check_mode:
    description: Runs the probes, and tells whether a change waits, without confirming it.
    support: full
  diff_mode:
    description: There is nothing to show but that the change is kept.
    support: none
notes:
  - Needs root.
requirements:
  - Python 3.9 or later on the node
seealso:
  - module: kubenode.proxy.service_proxy
  - module: kubenode.proxy.service_proxy_rollback
"""

EXAMPLES = r"""
- name: Change the mode, and take it back after two minutes unless it is confirmed
  kubenode.proxy.service_proxy:
    snapshot: /var/lib/kubenode-proxy/snapshot.json.gz
    mode: nftables
    confirm_timeout: 120
  register: converged

- name: Connect anew
  ansible.builtin.meta: reset_connection

- name: Keep the change
  kubenode.proxy.service_proxy_confirm:
    state: "{{ converged.saved_state }}"
    probes: "{{ converged.probes + ['http://10.96.44.7/healthz'] }}"
  when: converged.confirm_until | default('', true) != ''
"""

RETURN = r"""
state:
  description: Number of the state before the change. V(null) if none was waiting.
  type: int
  returned: success
  sample: 12
remaining_seconds:
  description: Seconds that were left when the change was confirmed.
  type: float
  returned: success
  sample: 97.3
probes:
  description: How the probes went.
  type: list
  elements: dict
  returned: always
  contains:
    probe:
      description: The probe.
      type: str
      sample: tcp://10.96.0.1:443
    answered:
      description: Whether it succeeded.
      type: bool
      sample: true
    reason:
      description: Why not.
      type: str
      sample: ""
    attempts:
      description: How many times it was tried.
      type: int
      sample: 1
    seconds:
      description: After how many seconds it was decided.
      type: float
      sample: 0.002
error_kind:
  description: The kind of failure, V(history), V(configuration) or V(kernel).
  type: str
  returned: failure
  sample: history
"""

from typing import Any, Dict, List

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.history import pending
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.history.confirm import confirm
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.history.store import DEFAULT_DIRECTORY
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.probes import (
    ProbeResult,
    parse_probe,
    run_probes,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.module_support.execution import run, warn


def _records(results: List[ProbeResult]) -> List[Dict[str, Any]]:
    return [{**item._asdict(), "probe": str(item.probe)} for item in results]


def confirmed(module: AnsibleModule) -> Dict[str, Any]:
    """Probe, confirm, and return how it went."""
    parameters: Dict[str, Any] = module.params
    probes = [parse_probe(text) for text in parameters["probes"]]
    waiting = pending.read()
    results = run_probes(probes, parameters["probe_timeout"]) if probes else []
    failed = [item for item in results if not item.answered]
    if failed:
        reasons = "; ".join(f"{item.probe}: {item.reason} (tried {item.attempts} times)" for item in failed)
        left = f"; {waiting}, then the node goes back" if waiting is not None else ""
        module.fail_json(
            msg=f"not confirmed, since probes failed: {reasons}{left}", error_kind="history", probes=_records(results)
        )
    report = confirm(parameters["state"], bool(module.check_mode), parameters["history_directory"])
    warn(module, report.warnings, ())
    return {
        "changed": report.changed,
        "state": report.state,
        "remaining_seconds": report.remaining,
        "probes": _records(results),
    }


def main() -> None:
    """The module."""
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "int"},
            "probes": {"type": "list", "elements": "str", "default": []},
            "probe_timeout": {"type": "float", "default": 15.0},
            "history_directory": {"type": "path", "default": DEFAULT_DIRECTORY},
        },
        supports_check_mode=True,
    )
    run(module, confirmed)


if __name__ == "__main__":
    main()
