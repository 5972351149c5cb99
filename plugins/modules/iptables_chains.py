#!/usr/bin/python
# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: iptables_chains
short_description: Manage complete iptables chains atomically
version_added: 0.1.0
author:
  - kubenode.proxy contributors (@kubenode)
description:
  - Ensures that each listed chain contains exactly its listed rules, in that order, and that the requested jumps lead
    to it.
  - All chains of a table are changed in one transaction of C(iptables-restore), so packets see either the old rules or
    the new ones, never a mix. Chains that do not change keep their packet counters.
  - Chains that are not listed are not changed, except for the requested jumps.
  - Rules may be written in any form that iptables accepts. They are first tried in an empty network namespace, so that
    an error in any rule is found before anything is changed, in check mode too.
notes:
  - Trying the rules may make the kernel load modules for matches and targets, in check mode too, as listing rules does.
  - Without permission to create a network namespace (CAP_SYS_ADMIN), rules are compared as text and must be written as
    C(iptables-save) prints them. The same applies to rules that refer to ipsets or nfacct counters.
extends_documentation_fragment:
  - kubenode.proxy.attributes
options:
  chains:
    description:
      - The chains.
    type: list
    elements: dict
    required: true
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
            description: Where a missing jump is inserted. An existing jump is not moved.
            type: str
            choices: [first, last]
            default: first
  state:
    description:
      - With V(absent) the chains are removed, together with the jumps to them in built-in chains and in chains named in
        C(jumps). It is an error if other chains jump to them.
    type: str
    choices: [present, absent]
    default: present
  variant:
    description:
      - Which iptables to use if both variants are installed. V(auto) detects which one the node uses.
    type: str
    choices: [auto, legacy, nft]
    default: auto
  lock_timeout:
    description:
      - Seconds to wait for the xtables lock.
    type: int
    default: 5
seealso:
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
          - -j DNAT --to-destination 10.0.0.20:8443

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
  returned: success
  type: dict
  sample:
    IPv4: "iptables 1.8.9 (nft: the only variant installed)"
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

import os
from typing import Any, Dict, List, Mapping

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.kubenode.proxy.plugins.module_utils.addresses import IPV4, IPV6
from ansible_collections.kubenode.proxy.plugins.module_utils.errors import KernelError, ProxyError
from ansible_collections.kubenode.proxy.plugins.module_utils.generic.iptables_chains import (
    Jump,
    ListedChain,
    ListedChainsResource,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.xtables.variant import detect_variant
from ansible_collections.kubenode.proxy.plugins.module_utils.module_support import tables
from ansible_collections.kubenode.proxy.plugins.module_utils.resources import PlannedChange, difference

_FAMILIES = {"ipv4": (IPV4,), "ipv6": (IPV6,), "both": (IPV4, IPV6)}


def _chain(options: Mapping[str, Any]) -> ListedChain:
    jumps = options["jumps"]
    if jumps is not None:
        jumps = tuple(Jump(jump["from"], jump["match"].strip(), jump["position"]) for jump in jumps)
    return ListedChain(options["table"], options["name"], tuple(rule.strip() for rule in options["rules"]), jumps)


def _resources(parameters: Mapping[str, Any]) -> List[ListedChainsResource]:
    resources = []
    for family in (IPV4, IPV6):
        chains = [_chain(options) for options in parameters["chains"] if family in _FAMILIES[options["family"]]]
        if chains:
            wanted = "" if parameters["variant"] == "auto" else parameters["variant"]
            variant = detect_variant(family, wanted)
            removal = parameters["state"] == "absent"
            resources.append(ListedChainsResource(variant, chains, parameters["lock_timeout"], removal))
    return resources


def _apply(planned: List[PlannedChange]) -> None:
    done: List[str] = []
    for item in planned:
        if not item.change:
            continue
        try:
            item.resource.apply(item.change)
        except KernelError as error:
            already = f" ({', '.join(done)} already changed)" if done else ""
            raise KernelError(f"{error}{already}") from error
        done.append(item.resource.label)


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "chains": {
                "type": "list",
                "elements": "dict",
                "required": True,
                "options": {
                    "name": {"type": "str", "required": True},
                    "table": {
                        "type": "str",
                        "choices": ["filter", "nat", "mangle", "raw", "security"],
                        "default": "filter",
                    },
                    "family": {"type": "str", "choices": ["ipv4", "ipv6", "both"], "default": "ipv4"},
                    "rules": {"type": "list", "elements": "str", "default": []},
                    "jumps": {
                        "type": "list",
                        "elements": "dict",
                        "options": {
                            "from": {"type": "str", "required": True},
                            "match": {"type": "str", "default": ""},
                            "position": {"type": "str", "choices": ["first", "last"], "default": "first"},
                        },
                    },
                },
            },
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
            "variant": {"type": "str", "choices": ["auto", "legacy", "nft"], "default": "auto"},
            "lock_timeout": {"type": "int", "default": 5},
        },
        supports_check_mode=True,
    )
    refused = tables.root_needed(os.geteuid(), "changing iptables chains")
    if refused:
        module.fail_json(**refused)
    try:
        resources = _resources(module.params)
        planned = [PlannedChange(resource, difference(*resource.stage())) for resource in resources]
        if not module.check_mode:
            _apply(planned)
    except ProxyError as error:
        module.fail_json(**tables.failure(error))
    result: Dict[str, Any] = {
        "changed": any(item.change for item in planned),
        "variants": {resource.variant.family: str(resource.variant) for resource in resources},
        "changes": tables.change_records(planned),
    }
    if module._diff:
        result["diff"] = tables.planned_differences(planned)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
