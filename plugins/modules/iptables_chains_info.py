#!/usr/bin/python
# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

DOCUMENTATION = r"""
module: iptables_chains_info
short_description: List the rules of iptables chains
version_added: 1.0.0
author:
  - kubenode.proxy contributors (@kubenode)
description:
  - Lists iptables chains with their rules as C(iptables-save) prints them. No table is created by listing.
  - A table with rules that only nft understands cannot be listed. It is named in a warning and in RV(unreadable).
extends_documentation_fragment:
  - kubenode.proxy.attributes.info
  - kubenode.proxy.attributes
options:
  chains:
    description: Names of the chains to list, built-in ones included. All chains if empty.
    type: list
    elements: str
    default: []
  table:
    description: List only the chains of this table.
    type: str
    choices: [filter, nat, mangle, raw, security]
  family:
    description: Whether to list the chains of iptables, ip6tables or both.
    type: str
    choices: [ipv4, ipv6, both]
    default: ipv4
  variant:
    description:
      - Which iptables to use if both variants are installed. V(auto) detects which one the node uses.
    type: str
    choices: [auto, legacy, nft]
    default: auto
seealso:
  - module: kubenode.proxy.iptables_chains
"""

EXAMPLES = r"""
- name: List the chain INPUT and what leads out of it
  kubenode.proxy.iptables_chains_info:
    chains: [INPUT, MANAGEMENT]
  register: firewall

- name: Check that management access comes first
  ansible.builtin.assert:
    that: (firewall.chains | selectattr('name', 'eq', 'INPUT') | first).rules[0] == '-j MANAGEMENT'
"""

RETURN = r"""
chains:
  description: The chains, by family and table, in the order of C(iptables-save).
  returned: success
  type: list
  elements: dict
  contains:
    name:
      description: Name of the chain.
      type: str
      returned: always
      sample: MANAGEMENT
    table:
      description: Table of the chain.
      type: str
      returned: always
      sample: filter
    family:
      description: Family of the chain, V(ipv4) or V(ipv6).
      type: str
      returned: always
      sample: ipv4
    builtin:
      description: Whether it is a built-in chain, which the kernel calls.
      type: bool
      returned: always
      sample: false
    rules:
      description: The rules, without command and chain.
      type: list
      elements: str
      returned: always
      sample: ["-p tcp -m tcp --dport 22 -j ACCEPT"]
unreadable:
  description: The tables that C(iptables-nft-save) does not show, because they hold rules that only nft understands.
  returned: success
  type: list
  elements: dict
  contains:
    table:
      description: Name of the table.
      type: str
      returned: always
      sample: filter
    family:
      description: Family of the table, V(ipv4) or V(ipv6).
      type: str
      returned: always
      sample: ipv4
  sample: []
variants:
  description: The iptables that was used for each family, and why.
  returned: success
  type: dict
  sample:
    IPv4: "iptables 1.8.9 (nft: the only variant installed)"
error_kind:
  description: The kind of failure, for conditions in playbooks.
  returned: failure
  type: str
  sample: kernel
"""

from typing import Any

from ansible.module_utils.basic import AnsibleModule

# pylint: disable-next=unused-import
import ansible_collections.kubenode.proxy.plugins.module_utils.module_support.supported_python  # noqa: F401
from ansible_collections.kubenode.proxy.plugins.module_utils.base.addresses import IPV4, IPV6
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.xtables.chains import (
    SavedTables,
    parse_save,
    unreadable_text,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.xtables.restore import save
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.xtables.variant import detect_variant
from ansible_collections.kubenode.proxy.plugins.module_utils.module_support.execution import run

_FAMILIES = {"ipv4": IPV4, "ipv6": IPV6}


def _chains(saved: SavedTables, family: str, parameters: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the chains of one family that the options select."""
    return [
        {"name": name, "table": table, "family": family, "builtin": (table, name) in saved.builtin, "rules": rules}
        for (table, name), rules in saved.chains.items()
        if parameters["table"] in (None, table) and (not parameters["chains"] or name in parameters["chains"])
    ]


def _found(module: AnsibleModule) -> dict[str, Any]:
    """Return the result; warn of tables that cannot be shown. Raises ProxyError."""
    parameters = module.params
    found: list[dict[str, Any]] = []
    unreadable: list[dict[str, str]] = []
    variants: dict[str, str] = {}
    wanted = "" if parameters["variant"] == "auto" else parameters["variant"]
    for name, family in _FAMILIES.items():
        if parameters["family"] in (name, "both"):
            variant = detect_variant(family, wanted)
            variants[family] = str(variant)
            saved = parse_save(save(variant))
            found += _chains(saved, name, parameters)
            for table in saved.unreadable:
                if parameters["table"] in (None, table):
                    unreadable.append({"table": table, "family": name})
                    module.warn(unreadable_text(variant, table))
    return {"changed": False, "chains": found, "unreadable": unreadable, "variants": variants}


_OPTIONS = {
    "chains": {"type": "list", "elements": "str", "default": []},
    "table": {"type": "str", "choices": ["filter", "nat", "mangle", "raw", "security"]},
    "family": {"type": "str", "choices": ["ipv4", "ipv6", "both"], "default": "ipv4"},
    "variant": {"type": "str", "choices": ["auto", "legacy", "nft"], "default": "auto"},
}


def main() -> None:
    """Run the module."""
    run(_found, _OPTIONS, needs_root="listing iptables chains")


if __name__ == "__main__":
    main()
