# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Parameters of kernel modules: given when a module is loaded, shown in /sys/module, some of them writable there."""

from __future__ import annotations

import os
import re
from typing import Any, Callable, Collection, Iterable, Mapping, NamedTuple

from ...base.errors import ConfigurationError, KernelError, os_errors
from ...base.whole_files import MANAGED_LINE
from ...resources import Change, Kind, Resource
from .. import facts
from .modules import canonical_name, declared_parameters

_NAME = re.compile(r"[A-Za-z0-9_]{1,64}\Z")
# Values that need no quotes in modprobe.d and on modprobe's command line.
_VALUE = re.compile(r"[A-Za-z0-9_.,:/@%+-]{1,255}\Z")
_TRUE, _FALSE = frozenset(("y", "1", "true", "yes", "on")), frozenset(("n", "0", "false", "no", "off"))


class ParameterKey(NamedTuple):
    """A parameter of a module."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


Parameters = dict[ParameterKey, str]


def parse_parameters(given: Mapping[str, Any]) -> Parameters:
    """Return parameters from a mapping of modules to mappings. Raises ConfigurationError naming the invalid one.

    Booleans become 1 and 0, which every kind of parameter accepts.
    """
    found: Parameters = {}
    for module, values in given.items():
        if not isinstance(values, Mapping):
            raise ConfigurationError(f"parameters.{module}: not a mapping of parameters to values")
        for name, value in values.items():
            where = f"parameters.{module}.{name}"
            if not _NAME.match(str(name)):
                raise ConfigurationError(f"{where}: not the name of a parameter (letters, digits and '_')")
            text = str(int(value)) if isinstance(value, bool) else str(value)
            if not _VALUE.match(text):
                raise ConfigurationError(f"{where}: {text!r} is not a value without spaces and quotes")
            key = ParameterKey(canonical_name(module), str(name))
            if key in found:
                raise ConfigurationError(f"{where}: given twice, since '-' and '_' in a module's name are equal")
            found[key] = text
    return found


def arguments_of(module: str, parameters: Mapping[ParameterKey, str]) -> list[str]:
    """Return the arguments that modprobe takes for a module: ``name=value``."""
    return [f"{key.name}={value}" for key, value in parameters.items() if key.module == module]


def modprobe_file(parameters: Mapping[ParameterKey, str]) -> str:
    """Return the text of a modprobe.d file with the parameters of modules."""
    modules = dict.fromkeys(key.module for key in parameters)
    lines = [f"options {module} {' '.join(arguments_of(module, parameters))}\n" for module in modules]
    return f"{MANAGED_LINE}\n{''.join(lines)}"


def same(one: str, other: str) -> bool:
    """Return whether two values mean the same to the kernel, which prints booleans as Y and N."""
    one, other = one.strip().lower(), other.strip().lower()
    if one == other:
        return True
    if "y" in (one, other) or "n" in (one, other):
        return {one, other} <= _TRUE or {one, other} <= _FALSE
    try:
        return int(one, 0) == int(other, 0)
    except ValueError:
        return False


def boot_parameters(root: str = "") -> Parameters:
    """Return the parameters of modules on the kernel's command line, which alone sets those of built-in code."""
    found: Parameters = {}
    for word in (facts.read_text(f"{root}/proc/cmdline") or "").split():
        if word == "--":
            # What follows is for the first process.
            break
        name, _equals, value = word.partition("=")
        module, dot, parameter = name.partition(".")
        if dot:
            # The kernel takes "-" and "_" as equal in both names.
            found[ParameterKey(module.replace("-", "_"), parameter.replace("-", "_"))] = value
    return found


def shown_parameters(module: str, root: str = "") -> dict[str, str]:
    """Return the values of a module's parameters that the kernel shows to this process, by name."""
    directory = f"{root}/sys/module/{module}/parameters"
    try:
        names = sorted(os.listdir(directory))
    except OSError:
        return {}
    values = {name: facts.read_text(f"{directory}/{name}") for name in names}
    return {name: value.strip() for name, value in values.items() if value is not None}


def _on_command_line(key: ParameterKey, value: str) -> str:
    return f"{key}={value} on the kernel's command line, since the module is built into the kernel"


class ModuleParametersResource(Resource[ParameterKey, str]):
    """Parameters of modules whose code is in the kernel; those of others are given when the module is loaded."""

    kind = Kind.MODULE_PARAMETERS

    def __init__(
        self,
        parameters: Mapping[ParameterKey, str],
        present: Iterable[str],
        root: str = "",
        built_in: Iterable[str] = (),
        declared: Callable[[str], Collection[str]] = declared_parameters,
    ) -> None:
        """Take the wanted parameters, of all modules, the modules that are present, and those that are built in.

        ``declared``: returns the parameters that the file of a module declares.
        """
        modules = set(present)
        self._declared = declared
        #: After ``observe``: those that the module has and the kernel does not show.
        self.unseen: set[ParameterKey] = set()
        self.wanted = {key: value for key, value in parameters.items() if key.module in modules}
        self.built_in = frozenset(built_in)
        self.root = root

    def _path(self, key: ParameterKey) -> str:
        return f"{self.root}/sys/module/{key.module}/parameters/{key.name}"

    def _is_writable(self, key: ParameterKey) -> bool:
        """Return whether the kernel lets root change a parameter; it does not for one that it does not show."""
        try:
            return bool(os.stat(self._path(key)).st_mode & 0o200)
        except FileNotFoundError:
            return False

    def observe(self) -> Parameters:
        """Return the current values; a value that means the same as the wanted one is returned as that.

        A parameter that the kernel does not show is one of :attr:`unseen`, and counts as set: its value was used when
        the module was loaded. One of a built-in module has the value that the kernel's command line gives. Parameters
        that the module does not have have no entry.
        """
        found = {}
        self.unseen.clear()
        at_boot = boot_parameters(self.root)
        for key, wanted in self.wanted.items():
            text = facts.read_text(self._path(key))
            if text is None and key.module in self.built_in:
                text = at_boot.get(key)
            elif text is None and key.name in self._declared(key.module):
                self.unseen.add(key)
                text = wanted
            if text is not None:
                found[key] = wanted if same(text, wanted) else text.strip()
        return found

    def unchangeable(self, change: Change[ParameterKey, str]) -> dict[ParameterKey, str]:
        """Return the parameters of a change that cannot be set while their module is in the kernel, with the reason."""
        reasons = {}
        for key, wanted in change.new_values().items():
            if key in change.added:
                reasons[key] = f"the module in the kernel neither shows nor declares a parameter {key.name}"
                if key.module in self.built_in:
                    reasons[key] += f"; it may be set at boot, as {_on_command_line(key, wanted)}"
            elif not self._is_writable(key):
                when = "can only be set when the module is loaded"
                if key.module in self.built_in:
                    when = f"can only be set at boot, as {_on_command_line(key, wanted)}"
                reasons[key] = f"is {change.replaced[key][0]}, wanted {wanted}: {when}"
        return reasons

    def lost_at_boot(self) -> dict[ParameterKey, str]:
        """Return the parameters of built-in modules that a boot does not set to the wanted value, with the reason.

        Files of modprobe.d are for modules that are loaded.
        """
        at_boot = boot_parameters(self.root)
        return {
            key: f"is not set at boot, only as {_on_command_line(key, wanted)}"
            for key, wanted in self.wanted.items()
            if key.module in self.built_in and not (key in at_boot and same(at_boot[key], wanted))
        }

    def apply(self, change: Change[ParameterKey, str]) -> None:
        """Write the values that can be changed. Raises KernelError naming the parameter that the kernel refuses."""
        fixed = self.unchangeable(change)
        for key, (_old, new) in change.replaced.items():
            if key in fixed:
                continue
            doing = f"parameter {key}: cannot be set to {new}"
            with os_errors(KernelError, doing), open(self._path(key), "w", encoding="ascii") as stream:
                stream.write(new)
            made = (facts.read_text(self._path(key)) or new).strip()
            if not same(made, new):
                # To accept another value would mean to change it in every run.
                raise KernelError(f"parameter {key}: wanted {new}, but the kernel made it {made}")

    def describe(self, key: ParameterKey, value: str) -> list[str]:
        """Return one line, as on the kernel's command line."""
        return [f"{key}={value}"]
