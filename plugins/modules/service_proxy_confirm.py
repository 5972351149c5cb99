#!/usr/bin/python
# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

DOCUMENTATION = r"""
module: service_proxy_confirm
short_description: Confirm a change of the service proxy after probing it
version_added: 1.0.0
author:
  - kubenode.proxy contributors (@kubenode)
description:
  - With O(kubenode.proxy.service_proxy#module:confirm_timeout), a change by M(kubenode.proxy.service_proxy) is
    provisional. The node rolls it back automatically unless this module confirms it in time.
  - The probes run on the node. If one of them fails, the module fails and has the node roll the change back at once.
    It does not wait for the end of the rollback, whose result is in the journal of C(kubenode-proxy-revert.service).
  - Run the module over a new connection, after the meta task C(reset_connection). The confirmation then proves that
    the node can still be reached. The role P(kubenode.proxy.service_proxy#role) does all of this.
extends_documentation_fragment:
  - kubenode.proxy.attributes
  - kubenode.proxy.history_options
options:
  state:
    description:
      - Number of the state that was saved before the change, RV(kubenode.proxy.service_proxy#module:saved_state). The
        module fails if that change is no longer in effect, because the node has been rolled back or rebooted.
      - If not given, the module confirms the pending change, if there is one.
    type: int
  probes:
    description:
      - URLs of servers that must answer. V(tcp://10.96.0.1:443) must accept a connection, V(udp://10.96.0.5:514) must
        send a reply, V(tls://10.96.0.1:443) must answer a TLS handshake, V(http://10.96.0.7/ready) (or V(https)) must
        respond with a status below 400, and V(dns://10.96.0.10/kubernetes.default.svc.cluster.local) must answer the
        query. Certificates are not verified.
      - RV(kubenode.proxy.service_proxy#module:probes) contains probes of the API server and of the cluster's DNS.
    type: list
    elements: str
    default: []
  probe_timeout:
    description:
      - Seconds within which all probes must succeed. Failed probes are retried until then.
    type: float
    default: 15.0
attributes:
  action_group:
    description:
      - Use C(group/kubenode.proxy.history)
        in C(module_defaults) to set options that all modules of the group have.
    support: full
    membership:
      - kubenode.proxy.history
  check_mode:
    description: Runs the probes and reports whether a change is pending, without confirming it.
    support: full
  diff_mode:
    description: A confirmation changes nothing that could be shown as a diff.
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
- name: Change the mode, and roll back after two minutes unless the change is confirmed
  kubenode.proxy.service_proxy:
    snapshot: /var/lib/kubenode-proxy/snapshot.json.gz
    mode: nftables
    confirm_timeout: 120
  register: converged

- name: Reset the connection
  ansible.builtin.meta: reset_connection

- name: Confirm the change
  kubenode.proxy.service_proxy_confirm:
    state: "{{ converged.saved_state }}"
    probes: "{{ converged.probes + ['http://10.96.44.7/healthz'] }}"
  when: converged.confirm_until | default('', true) != ''
"""

RETURN = r"""
state:
  description: Number of the state before the change. V(null) if no change was pending.
  type: int
  returned: success
  sample: 12
remaining_seconds:
  description: Seconds that were left when the change was confirmed.
  type: float
  returned: success
  sample: 97.3
probes:
  description: Results of the probes.
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
      description: Why it failed. Empty if it succeeded.
      type: str
      sample: ""
    attempts:
      description: Number of attempts.
      type: int
      sample: 1
    seconds:
      description: Seconds until the probe succeeded or was given up.
      type: float
      sample: 0.002
error_kind:
  description: The kind of failure, V(history), V(configuration) or V(kernel).
  type: str
  returned: failure
  sample: history
"""

from typing import Any

from ansible.module_utils.basic import AnsibleModule

# pylint: disable-next=unused-import
import ansible_collections.kubenode.proxy.plugins.module_utils.module_support.supported_python  # noqa: F401
from ansible_collections.kubenode.proxy.plugins.module_utils.base.installed import HISTORY_DIRECTORY
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.probing.attempts import parse_probe, run_probes
from ansible_collections.kubenode.proxy.plugins.module_utils.module_support.execution import run, warn
from ansible_collections.kubenode.proxy.plugins.module_utils.module_support.results import probe_records
from ansible_collections.kubenode.proxy.plugins.module_utils.rollback.confirm import confirm, reject


def confirmed(module: AnsibleModule) -> dict[str, Any]:
    """Run the probes, confirm the pending change, and return the result."""
    parameters: dict[str, Any] = module.params
    probes = [parse_probe(text) for text in parameters["probes"]]
    results = run_probes(probes, parameters["probe_timeout"]) if probes else []
    failed = [item for item in results if not item.answered]
    if failed:
        reasons = "; ".join(f"{item.probe}: {item.reason} (tried {item.attempts} times)" for item in failed)
        outcome = "" if module.check_mode else reject(parameters["state"])
        module.fail_json(
            msg="; ".join(filter(None, (f"not confirmed because probes failed: {reasons}", outcome))),
            error_kind="history",
            probes=probe_records(results),
        )
    report = confirm(parameters["state"], bool(module.check_mode), parameters["history_directory"])
    warn(module, report.warnings, ())
    return {
        "changed": report.changed,
        "state": report.state,
        "remaining_seconds": report.remaining,
        "probes": probe_records(results),
    }


_OPTIONS = {
    "state": {"type": "int"},
    "probes": {"type": "list", "elements": "str", "default": []},
    "probe_timeout": {"type": "float", "default": 15.0},
    "history_directory": {"type": "path", "default": HISTORY_DIRECTORY},
}


def main() -> None:
    """Run the module."""
    run(confirmed, _OPTIONS)


if __name__ == "__main__":
    main()
