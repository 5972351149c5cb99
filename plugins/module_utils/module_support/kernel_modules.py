# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The work of the module ``kernel_modules``: kernel modules, their parameters, and the files for the next boot."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from ..base.errors import ConfigurationError, KernelError
from ..kernel import facts
from ..kernel.files import FilesResource, refuse_unwritable
from ..kernel.modules import boot_directories
from ..kernel.modules.module_parameters import ModuleParametersResource, arguments_of, modprobe_file, parse_parameters
from ..kernel.modules.module_profile import modules_for
from ..kernel.modules.modules import LOADED, ModulesResource, built_in_modules, modules_load_file, present_modules
from ..resources import PlannedChange, Stage, apply_plan, plan
from . import tables
from .execution import alone
from .own_file import boot_file, own_file, unread_warnings

if TYPE_CHECKING:
    from ansible.module_utils.basic import AnsibleModule

_PROXY_FILE = "/etc/modules-load.d/kubenode-proxy.conf"
#: Modes whose kernel modules depend on schedulers and on the filter backend.
_WITH_SCHEDULERS = frozenset(("ipvs",))


def _named_modules(parameters: dict[str, Any]) -> list[str]:
    names = list(parameters["modules"])
    if parameters["mode"]:
        version = facts.kernel_version(facts.kernel_release())
        for filter_backend in _filter_backends(parameters):
            names += modules_for(
                parameters["mode"], parameters["schedulers"], version, parameters["bridge_netfilter"], filter_backend
            )
    return list(dict.fromkeys(names))


def _filter_backends(parameters: dict[str, Any]) -> list[str]:
    """Return the filter backends of ipvs mode whose modules are meant; an empty name in other modes."""
    if parameters["mode"] not in _WITH_SCHEDULERS:
        return [""]
    if parameters["ipvs_filter_backend"]:
        return [str(parameters["ipvs_filter_backend"])]
    return ["iptables"] if parameters["state"] == "present" else ["iptables", "nftables"]


def _stages_present(parameters: dict[str, Any], path: str, options_path: str) -> list[Stage]:
    given = parse_parameters(parameters["parameters"])
    of_module = {key.module: arguments_of(key.module, given) for key in given}
    resource = ModulesResource(_named_modules(parameters), parameters=of_module)
    present = present_modules(of_module, resource.release)
    live = ModuleParametersResource(given, present, built_in=built_in_modules(present, resource.release))
    stages = [Stage(resource, resource.desired())]
    if options_path:
        # Before the module is loaded, for whatever else loads it at the same time.
        stages.insert(0, Stage(FilesResource([options_path]), {options_path: modprobe_file(given)}))
    if live.wanted:
        stages.append(Stage(live, live.wanted))
    if path:
        stages.append(Stage(FilesResource([path]), {path: modules_load_file(resource.names)}))
    return stages


def _stages_absent(parameters: dict[str, Any], path: str, options_path: str) -> list[Stage]:
    files = FilesResource([name for name in (path, options_path) if name])
    names: list[str] = []
    if parameters["unload"]:
        names = _named_modules(parameters)
        if not names:
            lines = files.observe().get(path, "").splitlines()
            names = [line.strip() for line in lines if line.strip() and line.strip()[0] not in "#;"]
    # Removals run in reverse: a module that cannot be unloaded must stay in the file, from which the next run reads it.
    stages: list[Stage] = [Stage(files, {})] if parameters["persistent"] else []
    stages.append(Stage(ModulesResource((), unload=list(reversed(names))), {}))
    return stages


def _options_file(parameters: dict[str, Any], path: str) -> str:
    """Return the path of the modprobe.d file; empty if the task needs none."""
    if not parameters["parameters"] or not parameters["persistent"]:
        return ""
    chosen = parameters["parameters_file"]
    return boot_file("parameters_file", str(chosen)) if chosen else f"/etc/modprobe.d/{os.path.basename(path)}"


def _refuse_unavailable(resource: ModulesResource, planned: PlannedChange) -> None:
    unavailable = resource.unavailable(planned.change.added)
    if unavailable:
        reasons = sorted(set(unavailable.values()))
        raise KernelError(f"kernel module {', '.join(unavailable)}: {'; '.join(reasons)}")


def _refuse_used(resource: ModulesResource, planned: PlannedChange) -> None:
    used = resource.in_use(planned.change.removed)
    if used:
        raise KernelError("; ".join(f"kernel module {name}: {reason}" for name, reason in used.items()))


def check_parameters(
    module: AnsibleModule, planned: list[PlannedChange], persistent: bool, doubtful: bool = False
) -> None:
    """Warn of parameters that wait until their module is loaded again, or raise KernelError, as the options say.

    ``persistent``: warn of those that a boot does not set as well, because their module is built in. ``doubtful``: warn
    of those that the kernel does not show, since other values may have been used when the module was loaded.
    """
    for item in planned:
        if not isinstance(item.resource, ModuleParametersResource):
            continue
        fixed = item.resource.unchangeable(item.change)
        reasons = "; ".join(f"parameter {key}: {reason}" for key, reason in fixed.items())
        if reasons and module.params["unchangeable"] == "fail":
            raise KernelError(f"{reasons}; with unchangeable: warn, this is only a warning")
        if reasons:
            module.warn(reasons)
        for key in sorted(item.resource.unseen) if doubtful else ():
            module.warn(f"parameter {key}: the kernel does not show it; it is used when the module is loaded")
        for key, reason in (item.resource.lost_at_boot() if persistent else {}).items():
            if key not in fixed:
                module.warn(f"parameter {key}: {reason}")
        for key in fixed:
            item.change.added.pop(key, None)
            item.change.replaced.pop(key, None)


def _check_loaded(module: AnsibleModule, planned: list[PlannedChange]) -> None:
    """Judge the parameters of modules that have just been loaded: the kernel ignores or adjusts values without a word.

    Raises KernelError as :func:`check_parameters` does, so that the next run finds the same.
    """
    given = parse_parameters(module.params["parameters"])
    lives = [item.resource for item in planned if isinstance(item.resource, ModuleParametersResource)]
    known = {key.module for live in lives for key in live.wanted}
    loaded = present_modules({key.module for key in given} - known, facts.kernel_release())
    resource = ModuleParametersResource(given, loaded)
    check_parameters(module, plan([Stage(resource, resource.wanted)]), False)


def _check_options(parameters: dict[str, Any]) -> None:
    """Raise ConfigurationError for options that do not fit each other."""
    if parameters["state"] == "present" and not parameters["modules"] and not parameters["mode"]:
        raise ConfigurationError("state is present but modules is empty and mode is not given")
    for name in ("schedulers", "ipvs_filter_backend"):
        if parameters[name] and parameters["mode"] not in _WITH_SCHEDULERS:
            raise ConfigurationError(f"{name}: only allowed with mode ipvs")


@alone
def changed(module: AnsibleModule) -> dict[str, Any]:
    """Make the modules, their parameters and files as declared and return the result. Raises ProxyError."""
    parameters = module.params
    _check_options(parameters)
    present = parameters["state"] == "present"
    listed = not present and parameters["unload"] and not parameters["modules"] and not parameters["mode"]
    path = own_file(parameters, "mode", _PROXY_FILE, parameters["persistent"] or listed)
    options_path = _options_file(parameters, path)
    planned = plan((_stages_present if present else _stages_absent)(parameters, path, options_path))
    loading, resource = next((item, item.resource) for item in planned if isinstance(item.resource, ModulesResource))
    _refuse_unavailable(resource, loading)
    _refuse_used(resource, loading)
    kept = refuse_unwritable(planned)
    # An earlier run has written the file before it loaded the module.
    written = {path for item in planned for path in item.change.new_values()}
    check_parameters(module, planned, bool(options_path), doubtful=not options_path or options_path in written)
    if present:
        kept += unread_warnings(
            ("persistent_file", path, boot_directories.unread(path, boot_directories.MODULES_LOAD)),
            ("parameters_file", options_path, boot_directories.unread(options_path, boot_directories.MODPROBE)),
        )
    for warning in kept:
        module.warn(warning)
    if not module.check_mode:
        apply_plan(planned)
        if present:
            _check_loaded(module, planned)
    return {
        "modules": list(resource.names or resource.unload),
        "loaded": [name for name, value in loading.change.added.items() if value == LOADED],
        "unloaded": list(loading.change.removed),
        "persistent_file": path if parameters["persistent"] else "",
        "parameters_file": options_path,
        "kernel_release": facts.kernel_release(),
        **tables.planned_result(planned, module._diff),
    }
