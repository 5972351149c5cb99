# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Kernel modules: find the present ones (loaded or built in), and load others.

Functions that read files take ``root``, the directory under which ``/proc``, ``/sys`` and ``/lib/modules`` are found.
"""

from __future__ import annotations

import fnmatch
import gzip
import os
import re
from types import MappingProxyType
from typing import Iterable, Mapping, NamedTuple, Sequence

from ...base.errors import ConfigurationError, KernelError
from ...base.ipvs_schedulers import SCHEDULERS
from ...base.whole_files import MANAGED_LINE
from ...resources import Change, Kind, Resource
from .. import facts
from ..programs import find_program, run
from . import boot_directories

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}\Z")
_KMOD_TIMEOUT_SECONDS = 120

LOADED = "loaded"

#: Programs that do nothing: with a rule to run one instead of loading a module, administrators forbid the module.
_LOADS_NOTHING = frozenset(("true", "false"))

# Among the users of a module without a function to end it.
_PERMANENT = "[permanent]"

_SET_KINDS = ("bitmap_port", "hash_ip", "hash_ipport", "hash_ipportip", "hash_ipportnet")
# The kernel configuration option that builds a module in, for kernels whose list of built-in modules is not installed.
_OPTIONS: Mapping[str, str] = {
    "br_netfilter": "CONFIG_BRIDGE_NETFILTER",
    "nft_chain_nat": "CONFIG_NFT_NAT",
    "xt_set": "CONFIG_NETFILTER_XT_SET",
    **{name: f"CONFIG_{name.upper()}" for name in ("dummy", "ip_set", "ip_vs", "nf_conntrack", "nf_nat", "nf_tables")},
    **{f"ip_set_{kind}": f"CONFIG_IP_SET_{kind.upper()}" for kind in _SET_KINDS},
    **{f"ip_vs_{scheduler}": f"CONFIG_IP_VS_{scheduler.upper()}" for scheduler in SCHEDULERS},
    **{
        f"{module}table_{table}": f"CONFIG_{option}_NF_{table.upper()}"
        for module, option in (("ip", "IP"), ("ip6", "IP6"))
        for table in ("filter", "mangle", "nat", "raw", "security")
    },
}


# Files that only exist while the code is in the kernel, built in or loaded; for modules that no list names.
_EVIDENCE: Mapping[str, str] = {
    "br_netfilter": "/proc/sys/net/bridge/bridge-nf-call-iptables",
    "ip_vs": "/proc/net/ip_vs",
    "ipv6": "/proc/net/if_inet6",
    "nf_conntrack": "/proc/sys/net/netfilter/nf_conntrack_max",
}


def canonical_name(name: str) -> str:
    """Return a module's name as the kernel writes it, with underscores. Raises ConfigurationError."""
    if not _NAME.match(name):
        raise ConfigurationError(f"kernel module {name!r}: not a module name (letters, digits, '_' and '-')")
    return name.replace("-", "_")


# -- present modules ---------------------------------------------------------------------------------------------------


class _Use(NamedTuple):
    """The number of users of a loaded module, and those that are modules or the mark of a permanent module."""

    users: int
    modules: tuple[str, ...]


def _uses(root: str) -> dict[str, _Use]:
    """Return the users of each loaded module, from /proc/modules; empty on a kernel without modules."""
    found: dict[str, _Use] = {}
    for line in (facts.read_text(f"{root}/proc/modules") or "").splitlines():
        fields = line.split()
        if len(fields) >= 5 and fields[4] == "Live":
            users = int(fields[2]) if fields[2].isdigit() else 0
            found[fields[0]] = _Use(users, tuple(filter(None, fields[3].strip("-").split(","))))
    return found


def loaded_modules(root: str = "") -> dict[str, int]:
    """Return loaded modules and the number of users of each; empty on a kernel without modules."""
    return {name: use.users for name, use in _uses(root).items()}


def _users_first(names: Iterable[str], uses: Mapping[str, _Use]) -> list[str]:
    """Return modules in an order in which they can be unloaded: each one after those among them that use it."""
    wanted = list(names)
    order: dict[str, None] = {}

    def add(name: str) -> None:
        for user in uses[name].modules if name in uses else ():
            if user in wanted:
                add(user)
        order[name] = None

    for name in wanted:
        if name not in order:
            add(name)
    return list(order)


def _module_names(text: str) -> set[str]:
    names = set()
    for line in text.splitlines():
        base = os.path.basename(line.partition(":")[0].strip())
        if ".ko" in base:
            names.add(base.partition(".ko")[0].replace("-", "_"))
    return names


def available_modules(release: str, root: str = "") -> set[str]:
    """Return modules installed for a kernel release (modules.dep), loaded or not; empty if the index is missing."""
    return _module_names(facts.read_text(f"{root}/lib/modules/{release}/modules.dep") or "")


def _built_in_by_configuration(names: Iterable[str], release: str, root: str) -> set[str]:
    options = {_OPTIONS[name]: name for name in names if name in _OPTIONS}
    if not options:
        return set()
    # Distributions that keep /boot small, or replace it as a whole, have the file beside the modules.
    text = facts.read_text(f"{root}/boot/config-{release}") or facts.read_text(f"{root}/lib/modules/{release}/config")
    if text is None:
        try:
            with gzip.open(f"{root}/proc/config.gz", "rt", encoding="utf-8", errors="replace") as stream:
                text = stream.read()
        except (OSError, EOFError):
            return set()
    lines = f"\n{text}\n"
    return {name for option, name in options.items() if f"\n{option}=y\n" in lines}


def present_modules(names: Iterable[str], release: str, root: str = "") -> set[str]:
    """Return the ``names`` whose code is in the running kernel: loaded or built in.

    Sources are /proc/modules, the list of built-in modules of the release, /sys/module, files that some modules
    provide, and, where that list is not installed, the kernel's own configuration. The running kernel itself is queried
    for modules that none of them shows and whose file is not installed, so that it loads none.
    """
    wanted = set(names)
    loaded = loaded_modules(root)
    present = {name for name in wanted if name in loaded}
    missing = wanted - present
    if missing:
        built_in_list = facts.read_text(f"{root}/lib/modules/{release}/modules.builtin")
        built_in = _module_names(built_in_list or "")
        for name in sorted(missing):
            if name in built_in or _shows(name, root):
                present.add(name)
        if built_in_list is None:
            present |= _built_in_by_configuration(missing - present, release, root)
        unknown = missing - present
        if unknown and not root:
            present |= _reported_by_kernel(unknown - available_modules(release), release)
    return present


def built_in_modules(names: Iterable[str], release: str, root: str = "") -> set[str]:
    """Return the ``names`` whose code is a part of the running kernel itself, which is never loaded."""
    loaded = {line.partition(" ")[0] for line in (facts.read_text(f"{root}/proc/modules") or "").splitlines()}
    return present_modules(names, release, root) - loaded


def _reported_by_kernel(names: set[str], release: str) -> set[str]:
    if not names:
        return set()
    # Imported late: seldom needed.
    from ..built_in import answers

    return {name for name in names if answers(name, lambda module: not asking_loads(module, release))}


def _shows(name: str, root: str) -> bool:
    """Return whether a module appears in /sys/module or by the files that it provides."""
    # A module that is being loaded or unloaded has a directory too; its state is in it.
    directory = f"{root}/sys/module/{name}"
    if os.path.isdir(directory) and not os.path.exists(f"{directory}/initstate"):
        return True
    return name in _EVIDENCE and os.path.exists(f"{root}{_EVIDENCE[name]}")


def asking_loads(name: str, release: str, root: str = "") -> bool:
    """Return whether a request to the kernel for a feature of the module would make it load the module.

    That is so if its file is installed and its code is not in the kernel. Otherwise the kernel has it or cannot load
    it, so even a check may send the request. This does not depend on the list of built-in modules, which may be
    missing.
    """
    return name in available_modules(release, root) and name not in present_modules([name], release, root)


def remedy(name: str, release: str, root: str = "") -> str:
    """Return the remedy for a module that is not available for the running kernel: one clause, by distribution."""
    installed = f"{root}/lib/modules"
    if not os.path.exists(f"{root}/proc/modules"):
        return "this kernel is built without loadable modules: boot a kernel that has the feature"
    if not os.path.isdir(f"{installed}/{release}"):
        others = sorted(os.listdir(installed)) if os.path.isdir(installed) else []
        if others:
            return f"modules are installed for {', '.join(others)} only: reboot into the installed kernel"
        return f"no kernel modules are installed here: install those of kernel {release}, or load it on the host"
    system = facts.distribution(root)
    if system.is_like("ubuntu"):
        return f"install the package linux-modules-extra-{release}"
    if system.is_like("debian"):
        return "install the package linux-image-amd64 instead of a cloud image, whose kernel leaves modules out"
    if system.is_like("rhel", "centos", "fedora"):
        return f"install the packages kernel-modules-{release} and kernel-modules-extra-{release}"
    if system.is_like("suse", "opensuse"):
        return "install the package kernel-default instead of kernel-default-base"
    return f"install the package that has the remaining modules of kernel {release}"


def _dependencies(name: str, release: str, root: str) -> set[str]:
    """Return a module and those that it depends on, which modprobe loads before it."""
    for line in (facts.read_text(f"{root}/lib/modules/{release}/modules.dep") or "").splitlines():
        if _module_names(line) == {name}:
            return {name, *_module_names(line.partition(":")[2].replace(" ", "\n"))}
    return {name}


def install_rule(name: str, release: str, root: str = "") -> tuple[str, str]:
    """Return the command that modprobe runs instead of loading a module, or one it depends on, and a clause about it.

    Both are empty if there is none.
    """
    concerned = _dependencies(name, release, root)
    for path in sorted(boot_directories.files_read(boot_directories.MODPROBE, root).values(), key=os.path.basename):
        for line in (facts.read_text(f"{root}{path}") or "").replace("\\\n", " ").splitlines():
            words = line.split(None, 2)
            is_rule = words[:1] == ["install"] and len(words) > 2
            if is_rule and fnmatch.filter(concerned, words[1].replace("-", "_")):
                return words[2], f'{path} has the rule "{line.strip()}"'
    return "", ""


# -- change ------------------------------------------------------------------------------------------------------------


def _kmod(program: str, arguments: Sequence[str]) -> tuple[int, str]:
    """Run a program of kmod; return its exit status and last line of output. Raises KernelError if it cannot be run."""
    path = find_program(program)
    if not path:
        raise KernelError(f"{program} is not installed: install the package kmod")
    done = run([path, *arguments], timeout=_KMOD_TIMEOUT_SECONDS)
    lines = f"{done.output}\n{done.errors}".strip().splitlines()
    return done.status, lines[-1].strip() if lines else f"{program} ended with status {done.status}"


def declared_parameters(name: str) -> set[str]:
    """Return the parameters that a module's file declares, some of which the kernel does not show; empty if unknown."""
    program = find_program("modinfo")
    done = run([program, "-F", "parm", name], timeout=_KMOD_TIMEOUT_SECONDS) if program else None
    return {line.partition(":")[0] for line in done.output.splitlines()} if done and done.status == 0 else set()


def _modprobe(arguments: Sequence[str]) -> tuple[int, str]:
    return _kmod("modprobe", arguments)


def _rmmod(name: str) -> tuple[int, str]:
    """Unload one module. ``modprobe -r`` would also unload modules that it used and that nothing else uses."""
    return _kmod("rmmod", ["--", name])


class ModulesResource(Resource[str, str]):
    """Kernel modules by name; the value is always LOADED, which includes built-in code.

    ``names`` are observed and loaded when missing. Only those also named in ``unload`` may be removed; so clean-up,
    whose desired table is empty, uses ``ModulesResource(())`` or omits this resource.
    """

    kind = Kind.MODULES

    def __init__(
        self,
        names: Sequence[str],
        unload: Sequence[str] = (),
        release: str = "",
        root: str = "",
        parameters: Mapping[str, Sequence[str]] = MappingProxyType({}),
    ) -> None:
        """Take names as users write them; ``parameters``: arguments for modprobe, by module."""
        self.names = tuple(dict.fromkeys(canonical_name(name) for name in names))
        self.unload = tuple(canonical_name(name) for name in unload)
        self.release = release or facts.kernel_release()
        self.root = root
        self.parameters = parameters

    def desired(self) -> dict[str, str]:
        """Return the table in which every named module is loaded."""
        return dict.fromkeys(self.names, LOADED)

    def observe(self) -> dict[str, str]:
        """Return the named modules that are present, without built-in ones among ``unload``: they cannot be removed.

        Those of ``unload`` come in an order in which they can be removed.
        """
        present = present_modules([*self.names, *self.unload], self.release, self.root)
        uses = _uses(self.root)
        shown = [name for name in self.names if name in present]
        removable = [name for name in self.unload if name in uses and name not in shown]
        shown += _users_first(removable, uses)
        return dict.fromkeys(shown, LOADED)

    def unavailable(self, names: Iterable[str]) -> dict[str, str]:
        """Return the ``names`` that are neither present nor installed for the running kernel, with a remedy.

        This only reads, for preflight and check mode.
        """
        candidates = list(names)
        missing = set(candidates) - present_modules(candidates, self.release, self.root)
        installed = available_modules(self.release, self.root)
        reasons = {}
        for name in (name for name in candidates if name in missing):
            command, rule = install_rule(name, self.release, self.root)
            if name not in installed:
                reasons[name] = f"not available for kernel {self.release}; {remedy(name, self.release, self.root)}"
            elif os.path.basename(command.split(None, 1)[0] if command else "") in _LOADS_NOTHING:
                reasons[name] = f"must not be loaded here: {rule}"
        return reasons

    def in_use(self, names: Iterable[str]) -> dict[str, str]:
        """Return the ``names`` that cannot be unloaded together, each with its users besides those; only read."""
        leaving = list(names)
        uses = _uses(self.root)
        reasons: dict[str, str] = {}
        for name in leaving:
            use = uses.get(name, _Use(0, ()))
            if _PERMANENT in use.modules:
                reasons[name] = "cannot be unloaded until the next boot, its code does not support it"
                continue
            others = [user for user in use.modules if user not in leaving]
            count = use.users - (len(use.modules) - len(others))
            if count > 0 or others:
                among = f": {', '.join(others)}" if others else ""
                reasons[name] = f"cannot be unloaded, it has {count} user(s){among}"
        return reasons

    def apply(self, change: Change[str, str]) -> None:
        """Load and unload modules. Raises KernelError naming the module, the kernel and the remedy."""
        wanted = list(change.added)
        if wanted:
            # These come first, because another module may load one of them as a dependency, without its parameters.
            for name in (name for name in wanted if self.parameters.get(name)):
                status, words = _modprobe(["--", name, *self.parameters[name]])
                if status != 0 and not self.unavailable([name]):
                    given = " ".join(self.parameters[name])
                    raise KernelError(f"kernel module {name} {given}: cannot be loaded: {words}")
            _modprobe(["-a", "--", *wanted])
            present = present_modules(wanted, self.release, self.root)
            for name in wanted:
                if name not in present:
                    raise self._refused(name)
        for name in change.removed:
            if name not in self.unload:
                raise KernelError(f"kernel module {name}: not one that this operation may unload")
        for name, reason in self.in_use(change.removed).items():
            raise KernelError(f"kernel module {name}: {reason}")
        for name in change.removed:
            status, words = _rmmod(name)
            if status != 0:
                raise KernelError(f"kernel module {name}: cannot be unloaded: {words}")

    def _refused(self, name: str) -> KernelError:
        absent = self.unavailable([name]).get(name)
        if absent is not None:
            return KernelError(f"kernel module {name}: {absent}")
        status, words = _modprobe(["--", name])
        _command, rule = install_rule(name, self.release, self.root)
        if rule:
            words = f"{words} ({rule})"
        elif status == 0:
            words = "modprobe reports success, but the module is not in the kernel"
        elif (facts.read_text(f"{self.root}/proc/sys/kernel/modules_disabled") or "").strip() == "1":
            words = "loading modules is switched off until the next boot (kernel.modules_disabled = 1)"
        elif facts.in_container(self.root):
            words += " (inside a container: load the module on the host)"
        return KernelError(f"kernel module {name}: cannot be loaded into kernel {self.release}: {words}")

    def describe(self, key: str, value: str) -> list[str]:
        """Return one line, as in a modules-load.d file."""
        return [key]


def modules_load_file(names: Sequence[str]) -> str:
    """Return the text of a modules-load.d file that loads ``names`` at boot."""
    return "".join(f"{line}\n" for line in (MANAGED_LINE, *names))
