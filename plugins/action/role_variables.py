# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Run kubenode.proxy.role_variables on the controller, where the role and the names of all variables are."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any, Dict, FrozenSet, Iterable, List, NamedTuple, Optional, Set

import yaml
from ansible.plugins.action import ActionBase

_ARGUMENTS = {
    "strict": {"type": "bool", "default": False},
    "facts": {"type": "list", "elements": "str", "default": []},
}
# How similar a name without its prefix must be to a variable of the role: difflib's ratio.
_ALIKE = 0.75


class Unknown(NamedTuple):
    """A variable that the role does not have; ``nearest`` is the variable that was probably meant, or empty."""

    name: str
    nearest: str

    def __str__(self) -> str:
        meant = f"; did you mean {self.nearest}?" if self.nearest else ""
        return f"{self.name} is not a variable of the role{meant}"


def known_variables(role: Path) -> FrozenSet[str]:
    """Return the variables of a role: options of all its entry points, defaults, and constants."""
    specification = yaml.safe_load((role / "meta" / "argument_specs.yml").read_text(encoding="utf-8"))
    known: Set[str] = set()
    for entry in specification["argument_specs"].values():
        known.update(entry.get("options", {}))
    for folder in ("defaults", "vars"):
        path = role / folder / "main.yml"
        if path.exists():
            known.update(yaml.safe_load(path.read_text(encoding="utf-8")) or {})
    return frozenset(known)


def unknown_variables(names: Iterable[str], prefix: str, known: FrozenSet[str]) -> List[Unknown]:
    """Return the names with the prefix that are not known, sorted."""
    suffixes = {name[len(prefix) :]: name for name in sorted(known) if name.startswith(prefix)}
    found = []
    for name in sorted(set(names) - known):
        if name.startswith(prefix):
            near = difflib.get_close_matches(name[len(prefix) :], suffixes, 1, _ALIKE)
            found.append(Unknown(name, suffixes[near[0]] if near else ""))
    return found


class ActionModule(ActionBase):
    """The action of the module, which has no part that runs on a host."""

    _requires_connection = False
    _supports_check_mode = True

    def run(self, tmp: Optional[str] = None, task_vars: Optional[Dict[str, Any]] = None) -> Dict[str, Any]:
        """Return the result of the task."""
        result: Dict[str, Any] = super().run(tmp, task_vars)
        _validation, options = self.validate_argument_spec(_ARGUMENTS)
        role = self._task._role
        if role is None:
            return {**result, "failed": True, "msg": "this task must be part of a role"}
        prefix = f"{role.get_name().rpartition('.')[2]}_"
        known = known_variables(Path(role._role_path)).union(options["facts"])
        found = unknown_variables(task_vars or (), prefix, known)
        misspelt = [item for item in found if item.nearest]
        result.update(changed=False, unknown=[item.name for item in found])
        if options["strict"]:
            if misspelt:
                return {**result, "failed": True, "msg": "; ".join(map(str, misspelt))}
            result["warnings"] = [str(item) for item in found]
        else:
            result["warnings"] = [str(item) for item in misspelt]
        return result
