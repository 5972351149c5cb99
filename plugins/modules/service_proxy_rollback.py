#!/usr/bin/python
# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

DOCUMENTATION = r"""
module: service_proxy_rollback
short_description: Restore a node's state that was saved before a change
version_added: 1.0.0
author:
  - kubenode.proxy contributors (@kubenode)
description:
  - Before a change, M(kubenode.proxy.service_proxy) saves the programmed state of the node, in any mode and by any
    service proxy. This module restores it.
  - Only the difference is applied. Chains, sets, virtual servers and addresses that do not belong to a service proxy
    are never touched, and open connections are kept.
  - The state before a rollback is saved as well, so that a rollback can be undone by its number.
  - Kernel modules are not unloaded. Connection tracking entries, counters and session affinity records are not saved.
extends_documentation_fragment:
  - kubenode.proxy.attributes
  - kubenode.proxy.history_options
  - kubenode.proxy.convergence_options
options:
  to:
    description:
      - Number of the saved state to restore.
      - Defaults to the newest state that was saved before a convergence. A second rollback then changes nothing.
    type: int
  accept_loss:
    description:
      - Whether to restore a state in which nothing was programmed, or of whose endpoints more than half do not exist
        any more. Otherwise this fails. Fewer lost endpoints are a warning.
      - Which endpoints exist is known from the copy of the cluster that the agent keeps on the node, or from the
        snapshot of the role P(kubenode.proxy.service_proxy#role), whichever is newer. Without both, none is lost.
    type: bool
    default: false
  ignore_findings:
    description:
      - Names of preflight findings to ignore, as for O(kubenode.proxy.service_proxy#module:ignore_findings). While
        kube-proxy runs on the node, which would revert the rollback, this fails with the finding V(kube-proxy), unless
        the state is one of network policies only. So it does with the finding V(kubelet) while kubelet uses an address
        of the API servers, which the agent or the present state serves; in check mode that is a warning.
        M(kubenode.proxy.kubelet_kubeconfig) with O(kubenode.proxy.kubelet_kubeconfig#module:state=absent) makes kubelet
        leave it.
    type: list
    elements: str
    default: []
  stop_agent:
    description:
      - Whether to stop the agent, C(kubenode-proxy.service), and the timer of the role
        P(kubenode.proxy.schedule#role), which would undo the rollback. Units that are enabled remain enabled and start
        at the next boot.
    type: bool
    default: true
  keep_states:
    description:
      - Number of saved states to keep. The oldest are removed.
      - By default none is removed; the next convergence that saves a state does so.
    type: int
notes:
  - Needs root.
  - A rollback cancels a change that is waiting for confirmation; see M(kubenode.proxy.service_proxy_confirm).
requirements:
  - Python 3.9 or later on the node
attributes:
  action_group:
    description:
      - Use C(group/kubenode.proxy.convergence), C(group/kubenode.proxy.history) or C(group/kubenode.proxy.state)
        in C(module_defaults) to set options that all modules of the group have.
    support: full
    membership:
      - kubenode.proxy.convergence
      - kubenode.proxy.history
      - kubenode.proxy.state
seealso:
  - module: kubenode.proxy.service_proxy
  - module: kubenode.proxy.service_proxy_confirm
"""

EXAMPLES = r"""
- name: Restore what was programmed before the last change
  kubenode.proxy.service_proxy_rollback:

- name: Show what a rollback would change
  kubenode.proxy.service_proxy_rollback:
  check_mode: true
  diff: true

- name: Restore a state from the list that the last run returned
  kubenode.proxy.service_proxy_rollback:
    to: 12
"""

RETURN = r"""
state:
  description: Number of the saved state.
  type: int
  returned: success
  sample: 12
saved_state:
  description: Number under which the state before the rollback was saved. V(null) if nothing was changed.
  type: int
  returned: success
  sample: 14
stopped:
  description: The units that were stopped, or would be in check mode.
  type: list
  elements: str
  returned: success
  sample: [kubenode-proxy.service]
changes:
  description: The tables that differed, with counts.
  type: list
  elements: dict
  returned: success
  sample:
    - {table: IPv4 chains (nft), added: 40, replaced: 6, removed: 0, entries: [nat KUBE-SERVICES], truncated: true}
states:
  description: The saved states, newest first.
  type: list
  elements: dict
  returned: success
  contains:
    number:
      description: Number of the state.
      type: int
      sample: 12
    created:
      description: When it was saved, in UTC.
      type: str
      sample: "2026-05-04T03:02:01Z"
    reason:
      description: Why it was saved.
      type: str
      sample: before a convergence
    mode:
      description: The detected mode, V(iptables), V(ipvs) or V(nftables). Empty if nothing was programmed.
      type: str
      sample: iptables
    counts:
      description: Number of entries of each kind.
      type: dict
      sample:
        chains: 512
        nftables_objects: 0
        ipvs_table_objects: 0
        network_policy_objects: 0
        virtual_servers: 0
        real_servers: 0
        set_elements: 0
        addresses: 0
    size_bytes:
      description: Size of its file.
      type: int
      sample: 20480
    outcome:
      description: Outcome of the change after it, if that change required confirmation.
      type: str
      sample: confirmed
    problem:
      description: Why the file cannot be used. Empty if it can.
      type: str
      sample: ""
durations:
  description: Seconds spent per stage and table.
  type: dict
  returned: success
  sample: {observe: 0.041, save: 0.02, apply: 0.112}
error_kind:
  description: The kind of failure, V(history), V(preflight) or V(kernel).
  type: str
  returned: failure
  sample: history
"""

from typing import Any

from ansible.module_utils.basic import AnsibleModule

# pylint: disable-next=unused-import
import ansible_collections.kubenode.proxy.plugins.module_utils.module_support.supported_python  # noqa: F401
from ansible_collections.kubenode.proxy.plugins.module_utils.base.installed import HISTORY_DIRECTORY
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.runtime.state_directory import control_socket
from ansible_collections.kubenode.proxy.plugins.module_utils.module_support.arguments import convergence_spec
from ansible_collections.kubenode.proxy.plugins.module_utils.module_support.execution import run, warn
from ansible_collections.kubenode.proxy.plugins.module_utils.module_support.results import (
    change_result,
    table_differences,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.rollback.lost_endpoints import Sources, judge_state
from ansible_collections.kubenode.proxy.plugins.module_utils.rollback.restore import RollbackRequest, rollback
from ansible_collections.kubenode.proxy.plugins.module_utils.rollback.store import History


def rolled_back(module: AnsibleModule) -> dict[str, Any]:
    """Restore a saved state and return the result."""
    parameters: dict[str, Any] = module.params
    sources = Sources(control=control_socket(parameters["state_directory"]))
    request = RollbackRequest(
        to=parameters["to"],
        history_directory=parameters["history_directory"],
        keep=parameters["keep_states"],
        check=bool(module.check_mode),
        describe=bool(module._diff),
        stop_units=parameters["stop_agent"],
        state_directory=parameters["state_directory"],
        lock_timeout=parameters["lock_timeout"],
        judge=lambda record: judge_state(record, parameters["accept_loss"], sources),
        ignore_findings=parameters["ignore_findings"],
    )
    report = rollback(request)
    warn(module, report.warnings, ())
    result = {
        "changed": report.changed or bool(report.stopped),
        "state": report.record.number,
        "saved_state": report.saved,
        "stopped": list(report.stopped),
        "changes": change_result(report.changes),
        "states": [item._asdict() for item in History(request.history_directory, request.keep).list()],
        "durations": {stage: round(seconds, 3) for stage, seconds in report.durations.items()},
    }
    if request.describe:
        result["diff"] = table_differences(report.changes, parameters["diff_lines"])
    return result


_OPTIONS = {
    "to": {"type": "int"},
    "accept_loss": {"type": "bool", "default": False},
    "ignore_findings": {"type": "list", "elements": "str", "default": []},
    "stop_agent": {"type": "bool", "default": True},
    **convergence_spec(),
    "history_directory": {"type": "path", "default": HISTORY_DIRECTORY},
    "keep_states": {"type": "int"},
}


def main() -> None:
    """Run the module."""
    run(rolled_back, _OPTIONS)


if __name__ == "__main__":
    main()
