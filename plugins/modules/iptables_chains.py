#!/usr/bin/python
# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

DOCUMENTATION = r"""
module: iptables_chains
short_description: Manage complete iptables chains atomically
version_added: 1.0.0
author:
  - kubenode.proxy contributors (@kubenode)
description:
  - Ensures that each listed chain contains exactly its listed rules, in that order, and that the requested jumps lead
    to it.
  - All chains of a table are changed in one transaction of C(iptables-restore), so packets see either the old rules or
    the new ones, never a mix. Chains that do not change keep their packet counters.
  - Chains that are not listed are not changed, except for the requested jumps.
  - Rules may be written in any form that iptables accepts, with addresses instead of host names. They are first tried
    in an empty network namespace, with empty copies of the ipsets that they refer to, so that an error in any rule, or
    a chain or an ipset that does not exist, is found before anything is changed, in check mode too.
  - If a change of several tables or families fails halfway, its applied part is rolled back at once.
  - With O(confirm_timeout) a change is provisional. The node rolls it back automatically, unless a task over a new
    connection confirms it in time, which shows that the change has not cut the node off.
notes:
  - A table with rules that only nft understands cannot be compared, so that tasks with chains in it fail.
  - Trying the rules may make the kernel load modules for matches and targets, in check mode too, as listing rules does.
  - Without permission to create a network namespace (CAP_SYS_ADMIN), no rule is tried. Rules are then compared as text
    and must be written as C(iptables-save) prints them; others are loaded again by every run. The same applies to rules
    that refer to nfacct counters or pinned BPF programs.
extends_documentation_fragment:
  - kubenode.proxy.attributes
options:
  chains:
    description:
      - The chains.
      - Required unless O(state=confirmed).
    type: list
    elements: dict
    default: []
    suboptions:
      name:
        description: Name of the chain, which must not be a built-in chain.
        type: str
        required: true
      table:
        description: Table of the chain.
        type: str
        choices: [filter, nat, mangle, raw, security]
        default: filter
      family:
        description: Whether the chain belongs to iptables, ip6tables or both.
        type: str
        choices: [ipv4, ipv6, both]
        default: ipv4
      rules:
        description:
          - Rules in the syntax of iptables, without command and chain, such as C(-p tcp --dport 22 -j ACCEPT).
          - A rule with several addresses in C(-s) or C(-d) becomes one rule for each, as with iptables itself. Host
            names are refused there, since iptables would resolve them only once.
        type: list
        elements: str
        default: []
      jumps:
        description:
          - Rules that jump to the chain. The built-in chains and the chains named here will contain exactly these jumps
            to it; jumps in other chains are not changed.
          - If not given, existing jumps are not changed.
        type: list
        elements: dict
        suboptions:
          from:
            description:
              - Chain that contains the jump, built-in or not. It must exist and must not itself be listed in O(chains).
            type: str
            required: true
          match:
            description: Condition of the jump in the syntax of iptables, without a target. None by default.
            type: str
            default: ""
          position:
            description:
              - With V(first) and V(last), the jump is kept at the head or the end of the chain that contains it; if it
                is in another place, it is moved. Several such jumps of one task stand in the order of the task. Two
                tasks, or another program, that demand the same place of a chain move each other's jumps at every run.
              - With V(any) a missing jump is inserted at the head, and an existing one is not moved.
            type: str
            choices: [any, first, last]
            default: any
  state:
    description:
      - With V(absent) the chains are removed, together with the jumps to them in built-in chains and in chains named in
        C(jumps). It is an error if other chains jump to them.
      - With V(confirmed) a provisional change is kept. Use it after the meta task C(reset_connection).
    type: str
    choices: [present, absent, confirmed]
    default: present
  confirm_timeout:
    description:
      - Seconds after which the node rolls the change back unless it is confirmed. V(0) makes the change final at once.
      - On nodes with systemd a timer does this, on others a background process. Only the rules of this task are
        rolled back. If another program has changed the same chains meanwhile, iptables may refuse that; the journal of
        the timer's service and a later task with O(state=confirmed) then have the reason.
      - While a change waits or is being rolled back, tasks that would change chains in the same tables fail, in check
        mode too, as do all other provisional changes.
    type: int
    default: 0
  change:
    description:
      - With O(state=confirmed), the change to confirm, RV(change) of the task that made it. The task fails if it has
        been rolled back. If empty, the change that waits is confirmed, if there is one.
    type: str
    default: ""
  variant:
    description:
      - Which iptables to use if both variants are installed. V(auto) detects which one the node uses.
    type: str
    choices: [auto, legacy, nft]
    default: auto
  lock_timeout:
    description:
      - Seconds to wait for the xtables lock, for the change and for a rollback of one that failed.
    type: int
    default: 5
seealso:
  - module: kubenode.proxy.iptables_chains_info
  - module: ansible.builtin.iptables
"""

EXAMPLES = r"""
- name: Manage a chain for management access and the jump to it
  kubenode.proxy.iptables_chains:
    chains:
      - name: MANAGEMENT
        family: both
        rules:
          - -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
          - -p tcp --dport 22 -m comment --comment "shell access" -j ACCEPT
          - -j RETURN
        jumps:
          - from: INPUT
            match: -i eth0

- name: Manage two chains, of which one jumps to the other
  kubenode.proxy.iptables_chains:
    chains:
      - name: PUBLISH
        table: nat
        rules:
          - -d 192.0.2.10/32 -p tcp --dport 443 -j PUBLISH-WEB
        jumps:
          - from: PREROUTING
          - from: OUTPUT
      - name: PUBLISH-WEB
        table: nat
        rules:
          - -p tcp -j DNAT --to-destination 10.0.0.20:8443

- name: Change the chain through which the controller connects, and roll back after a minute unless it is confirmed
  kubenode.proxy.iptables_chains:
    chains:
      - name: MANAGEMENT
        rules:
          - -s 192.0.2.0/24 -p tcp --dport 22 -j ACCEPT
          - -p tcp --dport 22 -j DROP
        jumps:
          - from: INPUT
            position: first
    confirm_timeout: 60
  register: management

- name: Reset the connection
  ansible.builtin.meta: reset_connection

- name: Confirm the change
  kubenode.proxy.iptables_chains:
    state: confirmed
    change: "{{ management.change }}"

- name: Remove a chain and the jumps to it
  kubenode.proxy.iptables_chains:
    chains:
      - name: MANAGEMENT
        family: both
    state: absent
"""

RETURN = r"""
variants:
  description: The iptables that was used for each family, and why.
  returned: success, with O(state=present) and O(state=absent)
  type: dict
  sample:
    IPv4: "iptables 1.8.9 (nft: the only variant installed)"
change:
  description: Name of the provisional change. Empty without O(confirm_timeout), without a change, and in check mode.
  returned: success
  type: str
  sample: 3f0c2a9be6d14c57
changes:
  description: The differences by table. At most 50 entries are named per table.
  returned: success
  type: list
  elements: dict
  contains:
    table:
      description: Name of the table.
      type: str
      returned: always
    added:
      description: Number of entries that were missing.
      type: int
      returned: always
    replaced:
      description: Number of entries that had a different value.
      type: int
      returned: always
    removed:
      description: Number of unexpected entries that were removed.
      type: int
      returned: always
    entries:
      description: Names of the first entries.
      type: list
      elements: str
      returned: always
    truncated:
      description: Whether there are more entries than those named.
      type: bool
      returned: always
  sample:
    - table: IPv4 chains
      added: 1
      replaced: 0
      removed: 0
      entries: [filter MANAGEMENT]
      truncated: false
error_kind:
  description: The kind of failure, for conditions in playbooks.
  returned: failure
  type: str
  sample: kernel
"""

import re
from typing import Any, Mapping

from ansible.module_utils.basic import AnsibleModule

# pylint: disable-next=unused-import
import ansible_collections.kubenode.proxy.plugins.module_utils.module_support.supported_python  # noqa: F401
from ansible_collections.kubenode.proxy.plugins.module_utils.base.addresses import IPV4, IPV6
from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import ConfigurationError
from ansible_collections.kubenode.proxy.plugins.module_utils.generic.chain_changes import (
    ChainChange,
    apply_changes,
    refuse_unconfirmed,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.generic.iptables_chains import ListedChainsResource
from ansible_collections.kubenode.proxy.plugins.module_utils.generic.listed_chains import Jump, ListedChain
from ansible_collections.kubenode.proxy.plugins.module_utils.generic.provisional import confirm
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.xtables.variant import detect_variant
from ansible_collections.kubenode.proxy.plugins.module_utils.module_support import tables
from ansible_collections.kubenode.proxy.plugins.module_utils.module_support.execution import run
from ansible_collections.kubenode.proxy.plugins.module_utils.resources import PlannedChange, difference

_FAMILIES = {"ipv4": (IPV4,), "ipv6": (IPV6,), "both": (IPV4, IPV6)}


def _chain(options: Mapping[str, Any]) -> ListedChain:
    jumps = options["jumps"]
    if jumps is not None:
        jumps = tuple(Jump(jump["from"], jump["match"].strip(), jump["position"]) for jump in jumps)
    return ListedChain(options["table"], options["name"], tuple(rule.strip() for rule in options["rules"]), jumps)


def _resources(parameters: Mapping[str, Any]) -> list[ListedChainsResource]:
    resources = []
    for family in (IPV4, IPV6):
        chains = [_chain(options) for options in parameters["chains"] if family in _FAMILIES[options["family"]]]
        if chains:
            wanted = "" if parameters["variant"] == "auto" else parameters["variant"]
            variant = detect_variant(family, wanted)
            removal = parameters["state"] == "absent"
            resources.append(ListedChainsResource(variant, chains, parameters["lock_timeout"], removal))
    return resources


_JUMP = {
    "from": {"type": "str", "required": True},
    "match": {"type": "str", "default": ""},
    "position": {"type": "str", "choices": ["any", "first", "last"], "default": "any"},
}
_CHAIN = {
    "name": {"type": "str", "required": True},
    "table": {"type": "str", "choices": ["filter", "nat", "mangle", "raw", "security"], "default": "filter"},
    "family": {"type": "str", "choices": ["ipv4", "ipv6", "both"], "default": "ipv4"},
    "rules": {"type": "list", "elements": "str", "default": []},
    "jumps": {"type": "list", "elements": "dict", "options": _JUMP},
}
_OPTIONS = {
    "chains": {"type": "list", "elements": "dict", "default": [], "options": _CHAIN},
    "state": {"type": "str", "choices": ["present", "absent", "confirmed"], "default": "present"},
    "confirm_timeout": {"type": "int", "default": 0},
    "change": {"type": "str", "default": ""},
    "variant": {"type": "str", "choices": ["auto", "legacy", "nft"], "default": "auto"},
    "lock_timeout": {"type": "int", "default": 5},
}


def _changed(module: AnsibleModule) -> dict[str, Any]:
    """Make the chains as declared, or keep a provisional change, and return the result. Raises ProxyError."""
    parameters = module.params
    confirming = parameters["state"] == "confirmed"
    if bool(parameters["chains"]) is confirming:
        what = "not allowed with" if confirming else "required unless"
        raise ConfigurationError(f"chains: {what} state confirmed")
    if parameters["confirm_timeout"] < 0:
        raise ConfigurationError("confirm_timeout: must not be negative")
    if confirming:
        return _confirmed(module)
    resources = _resources(parameters)
    changes = [ChainChange(resource, difference(*resource.stage())) for resource in resources]
    planned = [PlannedChange(*item) for item in changes]
    seconds = parameters["confirm_timeout"]
    change = ""
    if module.check_mode:
        refuse_unconfirmed(changes, seconds)
    else:
        change = apply_changes(changes, seconds)
    return {
        "change": change,
        "variants": {resource.variant.family: str(resource.variant) for resource in resources},
        **tables.planned_result(planned, module._diff),
    }


def _confirmed(module: AnsibleModule) -> dict[str, Any]:
    """Keep a provisional change and return the result. Raises ProxyError."""
    name = module.params["change"]
    if not re.fullmatch("[0-9a-f]*", name):
        raise ConfigurationError(f"change: {name!r} is not the name of a change")
    return {"changed": confirm(name, bool(module.check_mode)), "change": name, "changes": []}


def main() -> None:
    """Run the module."""
    run(_changed, _OPTIONS, needs_root="changing iptables chains")


if __name__ == "__main__":
    main()
