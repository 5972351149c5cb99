# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The work of the module ``ipvs_services``: from its options to its result."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Dict, List, Mapping

from ..base.addresses import FAMILIES
from ..base.errors import ConfigurationError, KernelError
from ..generic import ipvs_services as ipvs
from ..generic.ipvs_saving import change, predict
from ..resources import PlannedChange
from . import tables

if TYPE_CHECKING:
    from ansible.module_utils.basic import AnsibleModule

_SAVE_DIRECTORY = "/etc/sysconfig"


def _server(options: Mapping[str, Any]) -> ipvs.ListedServer:
    real_servers = options["real_servers"]
    if real_servers is not None:
        real_servers = tuple(
            ipvs.ListedReal(
                real["address"], real["port"], real["weight"], real["forwarding"], real["state"] == "present"
            )
            for real in real_servers
        )
    flags = None if options["flags"] is None else tuple(options["flags"])
    return ipvs.ListedServer(**{**options, "flags": flags, "real_servers": real_servers})


def _save_file(parameters: Mapping[str, Any]) -> str:
    if not parameters["save"]:
        return ""
    default = f"{_SAVE_DIRECTORY}/ipvsadm" if os.path.isdir(_SAVE_DIRECTORY) else "/etc/ipvsadm.rules"
    return str(parameters["save_file"] or default)


def _planned(parameters: Mapping[str, Any], wanted: ipvs.ListedTables, path: str, check: bool) -> List[PlannedChange]:
    """Plan and, unless ``check`` is set, apply all changes; ``path``: the file to write, empty for none."""
    purge = ipvs.purged_addresses(parameters["purge"])
    timeouts = ipvs.listed_timeouts(parameters["timeouts"] or {})
    present = parameters["state"] == "present"
    problem = ipvs.unavailable_schedulers(wanted) if present else ""
    if problem:
        raise KernelError(problem)
    families = FAMILIES if path else ()
    with ipvs.connect() as connection:
        declared = ipvs.stages(connection, wanted, purge=purge, present=present, timeouts=timeouts, families=families)
        return predict(connection, declared, path, timeouts) if check else change(connection, declared, path)


def changed(module: AnsibleModule) -> Dict[str, Any]:
    """Make the virtual servers as declared and return the result. Raises ProxyError."""
    parameters = module.params
    if not any(parameters[name] for name in ("services", "purge", "timeouts", "save")):
        raise ConfigurationError("services, purge, timeouts and save are all empty: nothing to do")
    path = _save_file(parameters)
    wanted = ipvs.listed_tables(_server(options) for options in parameters["services"])
    if wanted.absent and parameters["state"] == "absent":
        raise ConfigurationError("state: absent removes whole virtual servers; their real servers need no state")
    planned = _planned(parameters, wanted, path, bool(module.check_mode))
    return {
        "virtual_servers": len(wanted.servers),
        "real_servers": len(wanted.real_servers),
        "save_file": path,
        **tables.planned_result(planned, module._diff),
    }
