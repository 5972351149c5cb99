# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The hosts of this collection's playbooks."""

from __future__ import annotations

DOCUMENTATION = r"""
name: hosts
short_description: The hosts of this collection's playbooks
version_added: 1.0.0
author:
  - kubenode.proxy contributors (@kubenode)
description:
  - For the keyword C(hosts) of a play. Returns the pattern of C(proxy_hosts), or the group C(k8s_cluster) if that
    variable is not set.
  - Ansible succeeds with a play that has no host, which a verification must not. This fails if no host matches the
    pattern, for example because the source of the inventory cannot be read. If a playbook of this collection is run
    directly, and not imported by another one, it also fails if C(--limit) leaves none of them, and with
    C(--start-at-task), which would skip the checks of the first tasks, as C(--skip-tags always) would, with which it
    fails in any case.
  - Also fails for an extra variable (C(-e)) with a value of a wrong type, or that begins with a prefix of this
    collection's variables, such as C(migrate_), and is probably misspelt. Warns of one that resembles none of them.
    M(kubenode.proxy.role_variables) checks those of the inventory.
"""

EXAMPLES = r"""
- name: Verify the service proxy
  hosts: "{{ query('kubenode.proxy.hosts') }}"
"""

RETURN = r"""
_raw:
  description: The pattern of hosts.
  type: list
  elements: str
"""

from pathlib import Path
from typing import Any, Mapping, Optional

from ansible import context
from ansible.errors import AnsibleError, AnsibleLookupError
from ansible.inventory.manager import InventoryManager
from ansible.module_utils.common.arg_spec import ArgumentSpecValidator
from ansible.plugins.lookup import LookupBase
from ansible.utils.display import Display
from ansible.utils.vars import load_extra_vars

from ansible_collections.kubenode.proxy.plugins.module_utils.controller import variable_names

_COLLECTION = Path(__file__).resolve().parents[2]
_GROUP = "k8s_cluster"
# The names that were checked by an earlier play of this run.
_checked: set[str] = set()


def _run_directly() -> bool:
    """Return whether the command line names a playbook of this collection."""
    names = context.CLIARGS.get("args") or ()
    return any(
        name.startswith("kubenode.proxy.") or Path(name).resolve().parent == _COLLECTION / "playbooks" for name in names
    )


def _pattern(variables: Mapping[str, Any]) -> str:
    """Return the pattern of hosts. Raises AnsibleLookupError if there is none."""
    pattern = variables.get("proxy_hosts")
    if pattern:
        return ",".join(pattern) if isinstance(pattern, list) else str(pattern)
    if not variables["groups"].get("all"):
        raise AnsibleLookupError(
            "the inventory has no hosts: check its source, which -i names, and the warnings about it"
        )
    if _GROUP not in variables["groups"]:
        raise AnsibleLookupError(
            f"the inventory has no group {_GROUP}; name the hosts that are nodes of the cluster, "
            "as in -e proxy_hosts=GROUP"
        )
    return _GROUP


class LookupModule(LookupBase):
    """The lookup."""

    def run(self, terms: list[Any], variables: Optional[dict[str, Any]] = None, **kwargs: Any) -> list[str]:
        """Return the pattern. Raises AnsibleLookupError."""
        variables = variables or {}
        if any(context.CLIARGS.get(name) for name in ("syntax", "listtags", "listtasks")):
            return [str(variables.get("proxy_hosts") or _GROUP)]
        if context.CLIARGS.get("start_at_task") and _run_directly():
            raise AnsibleLookupError("--start-at-task: the first tasks check the hosts for the others; run all tasks")
        skipped = variable_names.skipped_checks(context.CLIARGS.get("skip_tags") or ())
        if skipped:
            raise AnsibleLookupError(skipped)
        self._check_names(variables)
        pattern = _pattern({**variables, "proxy_hosts": self._templar.template(variables.get("proxy_hosts"))})
        manager = self._inventory(variables["groups"])
        hosts = self._matching(manager, pattern)
        if not hosts:
            named = "proxy_hosts: " if variables.get("proxy_hosts") else ""
            raise AnsibleLookupError(f"{named}no host of the inventory matches {pattern}")
        limit = context.CLIARGS.get("subset")
        if limit and _run_directly():
            manager.subset(limit)
            if not self._matching(manager, pattern):
                raise AnsibleLookupError(f"--limit {limit}: none of these hosts is one of {pattern}")
        return [pattern]

    def _inventory(self, groups: Mapping[str, Any]) -> InventoryManager:
        """Return an inventory with these groups, for the syntax of patterns."""
        manager = InventoryManager(self._loader, parse=False)
        for group, hosts in groups.items():
            manager.add_group(group)
            for host in hosts:
                manager.add_host(host, group=group)
        return manager

    @staticmethod
    def _matching(manager: InventoryManager, pattern: str) -> list[Any]:
        try:
            found: list[Any] = manager.get_hosts(pattern)
        except AnsibleError as error:
            raise AnsibleLookupError(f"proxy_hosts: {pattern}: {error}") from error
        return found

    def _check_names(self, variables: Mapping[str, Any]) -> None:
        """Refuse misspelt extra variables and values, and wrong values of what Ansible evaluates with the play.

        Raises AnsibleLookupError.
        """
        given = load_extra_vars(self._loader)
        extra = frozenset(given) - _checked
        _checked.update(extra)
        found = variable_names.unknown_extra(extra, variable_names.collection_variables(_COLLECTION)) if extra else []
        misspelt = [item.text(variable_names.OWNER) for item in found if item.nearest]
        # An import of the playbook sets the latter as well.
        values = {name: variables[name] for name in variable_names.BEFORE_INVENTORY if name in variables}
        values.update((name, given[name]) for name in extra)
        if values:
            misspelt += variable_names.invalid_values(
                values, variable_names.options_of(_COLLECTION), ArgumentSpecValidator
            )
        if misspelt:
            raise AnsibleLookupError("; ".join(misspelt))
        for item in found:
            Display().warning(item.text(variable_names.OWNER))
