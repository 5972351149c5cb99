# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Run kubenode.proxy.role_variables on the controller, where the role and the names of all variables are."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Optional

from ansible import context
from ansible.module_utils.common.arg_spec import ArgumentSpecValidator
from ansible.playbook import Playbook
from ansible.playbook.role_include import IncludeRole
from ansible.plugins.action import ActionBase
from ansible.utils.collection_loader._collection_finder import _get_collection_playbook_path
from ansible.utils.vars import load_extra_vars

from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import ConfigurationError
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.files.static import parse_static
from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.load import load
from ansible_collections.kubenode.proxy.plugins.module_utils.controller import variable_names

_COLLECTION = Path(__file__).resolve().parents[2]
_ARGUMENTS = {
    "strict": {"type": "bool", "default": False},
    "facts": {"type": "list", "elements": "str", "default": []},
    "files": {"type": "list", "elements": "str", "default": []},
    "writes": {"type": "list", "elements": "str", "default": []},
    "configuration": {"type": "list", "elements": "str", "default": []},
}
# What runs with any --tags, and does nothing by itself.
_CHECKS = ("kubenode.proxy.role_variables", "ansible.builtin.validate_argument_spec", "meta", "ansible.builtin.meta")


class ActionModule(ActionBase):
    """The action of the module, which has no part that runs on a host."""

    _requires_connection = False
    _supports_check_mode = True

    def run(self, tmp: Optional[str] = None, task_vars: Optional[dict[str, Any]] = None) -> dict[str, Any]:
        """Return the result of the task."""
        result: dict[str, Any] = super().run(tmp, task_vars)
        task_vars = task_vars or {}
        strategy = self._task._parent._play.strategy
        if strategy.endswith(("free", "host_pinned")):
            text = f"strategy {strategy}: it repeats what is to run once for all hosts; use the strategy linear"
            return {**result, "failed": True, "msg": text}
        if self._nothing_selected(task_vars) or self._is_hollow(task_vars):
            given = {"--tags": task_vars["ansible_run_tags"], "--skip-tags": task_vars["ansible_skip_tags"]}
            words = " ".join(f"{option} {','.join(tags)}" for option, tags in given.items() if tags and tags != ["all"])
            return {**result, "failed": True, "msg": f"{words}: this selects no task, so nothing would be done"}
        _validation, options = self.validate_argument_spec(_ARGUMENTS)
        role, invalid, warnings = self._task._role, set(), set()

        def value_of(name: str) -> Any:
            return self._templar.template(task_vars.get(name))

        if role is None:
            hosts = [task_vars["hostvars"].raw_get(host) for host in task_vars["ansible_play_hosts_all"]]
            valid, extra = variable_names.options_of(_COLLECTION), load_extra_vars(self._loader)
            # Of the variables of the play as well, which an import of the playbook sets.
            for variables in (task_vars, *hosts):
                invalid.update(variable_names.invalid_values(variables, valid, ArgumentSpecValidator))
                # An address that all hosts share may be one of the play.
                invalid.update(variable_names.lonely({**task_vars, **variables}))
                warnings.update(variable_names.without_effect({**task_vars, **variables}))
            # What the play sets wins over the inventory.
            invalid |= {
                f"{name} has no effect in an inventory: pass it with -e"
                for name in variable_names.BEFORE_INVENTORY
                for variables in hosts
                if name in variables and name not in extra and task_vars.get(name, variables[name]) == variables[name]
            }
            names = frozenset(name for variables in hosts for name in variables)
            owner = variable_names.OWNER
            found = variable_names.unknown_in_inventory(names, variable_names.collection_variables(_COLLECTION))
        else:
            prefix = f"{role.get_name().rpartition('.')[2]}_"
            place = Path(role._role_path)
            known = variable_names.known_variables(place).union(options["facts"])
            # The role's arguments, which Ansible has evaluated and validated, have no ranges, and take texts for lists.
            own = variable_names.role_options(place)
            given = {name: value_of(name) for name in own.keys() & task_vars.keys()}
            invalid.update(variable_names.invalid_values(given, own, ArgumentSpecValidator))
            owner, found = "the role", variable_names.unknown_variables(task_vars, prefix, known)
        misspelt = [item for item in found if item.nearest]
        result.update(changed=False, unknown=[item.name for item in found])
        unusable = variable_names.unusable_files(options["files"], options["writes"], value_of)
        if unusable:
            return {**result, "failed": True, "msg": "; ".join(unusable)}
        # Only now: the variables have the content of a file.
        for configuration, of_node, static in zip(*(iter(options["configuration"]),) * 3):
            objects = parse_static({"service_proxy_static, service_proxy_api_servers": value_of(static) or []})
            invalid.update(map(str, objects.refusals))
            try:
                warnings.update(load(value_of(configuration), "", value_of(of_node)).warnings)
            except ConfigurationError as error:
                invalid.add(str(error))
        errors = [*sorted(invalid), *(item.text(owner) for item in misspelt if options["strict"])]
        if errors:
            return {**result, "failed": True, "msg": "; ".join(errors)}
        unknown = [item.text(owner) for item in (found if options["strict"] else misspelt)]
        result["warnings"] = [*sorted(warnings), *unknown]
        return result

    def _is_hollow(self, task_vars: dict[str, Any]) -> bool:
        """Return whether an include_role is selected by tags, and gives the tasks of the role none (``apply``)."""
        place = self._task._parent
        while place is not None and not isinstance(place, IncludeRole):
            place = place._parent
        known = {"all", "tagged", "untagged", *self._task.tags}
        return place is not None and not place.statically_loaded and known.isdisjoint(task_vars["ansible_run_tags"])

    def _nothing_selected(self, task_vars: dict[str, Any]) -> bool:
        """Return whether the tags of the command line leave nothing but checks in all plays of the run."""
        if "all" in task_vars["ansible_run_tags"] and not task_vars["ansible_skip_tags"]:
            return False
        for name in context.CLIARGS.get("args") or ():
            found = _get_collection_playbook_path(name)
            playbook = Playbook.load(found[1] if found else name, self._task._variable_manager, self._loader)
            for play in playbook.get_plays():
                for task in (task for block in play.compile() for task in block.get_tasks()):
                    tagged = task.evaluate_tags(play.only_tags, play.skip_tags, task_vars)
                    if tagged and task.action not in _CHECKS:
                        return False
        return True
