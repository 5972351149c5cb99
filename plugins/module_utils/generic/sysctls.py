# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The logic of the module ``sysctls``: kernel parameters from explicit values and from a profile of the proxy."""

from __future__ import annotations

from typing import Any, Mapping, NamedTuple, Optional, Sequence

from ..base.errors import ConfigurationError, ProxyError
from ..base.mode_names import NONE
from ..cluster.model import Node
from ..configuration.load import load
from ..configuration.model import ConntrackConfiguration
from ..configuration.validate import in_mode
from ..convergence.modes.stages.sysctls import conntrack_profile, profile_settings
from ..kernel import facts
from ..kernel.files import FilesResource
from ..kernel.modules import modules
from ..kernel.parameters import sysctl_files, sysctl_profile, sysctls
from ..rendering.build_settings import localhost_node_ports
from ..resources import PlannedChange, apply_plan, difference
from ..serviceports.node import node_addresses

# The memory per entry depends on the kernel's build; 320 bytes is the usual size of struct nf_conn with extensions.
_ENTRY_BYTES = 320

# Replaces the Node, which the module does not know, by one with an address of each family besides bindAddress. A Node
# without an IPv4 address differs if nodePortAddresses is primary: there the service proxy sets route_localnet itself.
_NODE = Node("", ("192.0.2.1", "2001:db8::1"), (), ())


class SysctlPlan(NamedTuple):
    """The planned changes, and the other parts of the result.

    ``running``: the values that the changes should give. ``keys_set``: the keys that :func:`carry_out` has changed,
    also if it fails; in check mode those that it would change.
    """

    planned: list[PlannedChange]
    running: dict[str, str] = {}
    explanations: Sequence[dict[str, str]] = ()
    unchanged_here: dict[str, str] = {}
    warnings: Sequence[str] = ()
    keys_set: Sequence[str] = ()


def _conntrack(options: Mapping[str, Any], cores: int) -> tuple[sysctl_profile.ConntrackProfile, str]:
    for name, value in options.items():
        if value < 0:
            raise ConfigurationError(f"profile.conntrack.{name}: {value} is negative")
    profile = conntrack_profile(ConntrackConfiguration(**options), cores)
    return profile, _reason(profile.maximum, options["max_per_core"], options["min"], cores)


def _reason(maximum: Optional[int], per_core: int, least: int, cores: int) -> str:
    """Explain how the size of the table was computed and how much memory it takes; empty if it is not changed."""
    if maximum is None:
        return ""
    need, have = maximum * _ENTRY_BYTES >> 20, facts.memory_bytes() >> 20
    return (
        f"{per_core} per core x {cores} cores, at least {least} (a full table takes about {need} of {have} MiB memory)"
    )


def profile_of(options: Mapping[str, Any], cores: int) -> dict[str, sysctl_profile.Setting]:
    """Return the profile of a configuration, overridden by the other options of ``profile``."""
    version = facts.kernel_version(facts.kernel_release())
    mode = options["mode"] or ""
    # A KubeProxyConfiguration cannot have this one, which is that of network policies only.
    loaded = load(options["configuration"] or {}, "" if mode == NONE else mode).configuration
    loaded = in_mode(loaded, mode or loaded.mode)
    localhost = localhost_node_ports(loaded, node_addresses(_NODE, loaded.bind_address))
    settings = profile_settings(loaded, version, cores, localhost)
    given = {name: options[name] for name in ("strict_arp", "route_localnet") if options[name] is not None}
    if options["conntrack"]:
        given["conntrack"], reason = _conntrack(options["conntrack"], cores)
    else:
        reason = _reason(settings.conntrack.maximum, loaded.conntrack.max_per_core, loaded.conntrack.min, cores)
    return sysctl_profile.profile(
        settings._replace(
            **given,
            estimation=options["estimation"],
            bridge_netfilter=options["bridge_netfilter"],
            netdev_max_backlog=options["netdev_max_backlog"],
            reserved_node_ports=options["reserved_node_ports"] or "",
            ipv6=facts.ipv6_supported(),
            maximum_reason=reason,
        )
    )


def _explicit(values: Mapping[str, Any]) -> dict[str, Optional[str]]:
    """Return the option ``values`` with canonical keys; None means not to change the parameter."""
    chosen: dict[str, Optional[str]] = {}
    for key, value in values.items():
        name = sysctls.canonical_key(str(key))
        if isinstance(value, (dict, list)):
            raise ConfigurationError(f"sysctl {name}: the value must be text or a number")
        if name in chosen:
            raise ConfigurationError(f"sysctl {name}: given twice")
        chosen[name] = None if value is None else sysctls.canonical_value(name, value)
    return chosen


def _missing_in_check_mode(change_added: Mapping[str, str]) -> list[str]:
    """Return a warning for each missing key whose kernel module can be loaded; raise ProxyError for other keys."""
    release = facts.kernel_release()
    warnings = []
    for key, value in change_added.items():
        name = sysctls.provider(key)
        if name is None or name in modules.present_modules([name], release):
            raise sysctls.missing_key(key, value)
        if name in modules.available_modules(release):
            warnings.append(f"sysctl {key}: needs the kernel module {name}, which is not loaded yet")
        else:
            raise sysctls.missing_key(key, value)
    return warnings


def plan_present(parameters: Mapping[str, Any], cores: int, check_mode: bool, path: str) -> SysctlPlan:
    """Return the changes after which the node has the parameters of the options ``values`` and ``profile``.

    ``cores``: by which the connection tracking table is sized. ``path``: the file for the next boot, or empty.
    ``check_mode``: parameters of kernel modules that could be loaded are warnings. Raises ProxyError, also for a
    parameter that cannot be changed unless ``unchangeable`` is ``warn``.
    """
    chosen = profile_of(parameters["profile"], cores) if parameters["profile"] else {}
    wanted = sysctl_profile.wanted_values(chosen)
    for key, value in _explicit(parameters["values"]).items():
        wanted.pop(key, None)
        if value is not None:
            wanted[key] = value
        if key in chosen:
            why = "not changed, as requested in values" if value is None else "as given in values"
            chosen[key] = sysctl_profile.Setting(value, why)
    resource = sysctls.SysctlsResource(wanted)
    running = resource.observe()
    desired = sysctls.resolve(wanted, running)
    change = difference(running, desired)
    warnings = _missing_in_check_mode(change.added) if check_mode else []
    blocked = sysctls.unchangeable(change.replaced)
    for key, (old, new) in change.replaced.items() if check_mode else ():
        if key not in blocked and sysctls.is_misread(key, new, old):
            raise sysctls.refused_value(key, old, new)
    unchanged_here: dict[str, str] = {}
    for key, reason in blocked.items():
        old, new = change.replaced[key]
        message = f"sysctl {key}: {sysctls.stated_difference(old, new)}: {reason}"
        if parameters["unchangeable"] == "fail":
            raise ProxyError(f"{message}, or leave it with unchangeable=warn (in the role: kernel_unchangeable)")
        warnings.append(message)
        unchanged_here[key] = reason
        del change.replaced[key]
    planned = [PlannedChange(resource, change)]
    if path:
        files = FilesResource([path])
        existing = files.observe()
        persistent = sysctl_files.persistent_values(wanted, running, existing.get(path, ""))
        content = sysctl_files.sysctl_file(persistent, {key: setting.why for key, setting in chosen.items()})
        planned.append(PlannedChange(files, difference(existing, {path: content})))
        warnings += sysctl_files.boot_conflicts(path, content)
    after = {**running, **change.new_values()}
    keys_set = list(change.replaced) if check_mode else resource.written
    return SysctlPlan(
        planned=planned,
        running=after,
        explanations=sysctl_profile.explanations(chosen),
        unchanged_here=unchanged_here,
        warnings=warnings,
        keys_set=keys_set,
    )


def plan_absent(path: str) -> SysctlPlan:
    """Return the removal of the file for the next boot; the running values are kept. Raises KernelError.

    ``path``: the file, or empty for none.
    """
    files = FilesResource([path] if path else [])
    return SysctlPlan([PlannedChange(files, difference(files.observe(), {}))])


def carry_out(chosen: SysctlPlan) -> dict[str, str]:
    """Make the planned changes and return the running values after them, as the kernel has them. Raises KernelError."""
    apply_plan(chosen.planned)
    running: dict[str, str] = {}
    for item in chosen.planned:
        if isinstance(item.resource, sysctls.SysctlsResource):
            running.update(item.resource.observe())
    return running
