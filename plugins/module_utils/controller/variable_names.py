# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Variables without effect: names that neither a role nor a playbook has, and values that are invalid.

Ansible ignores such names, so that a misspelt one silently leaves the default in effect.
"""

from __future__ import annotations

import difflib
import os
import re
from errno import EISDIR
from pathlib import Path
from typing import Any, Callable, Iterable, Mapping, NamedTuple, Sequence

from ..base.errors import ConfigurationError
from ..base.ranges import unacceptable
from ..base.whole_files import check_room
from ..cluster.api.access.kubeconfig import read_choice
from ..configuration.documents import parse_documents

#: What does not have the variables that the two functions for a whole run return.
OWNER = "this collection"
# How similar a name without its prefix must be to a variable: difflib's ratio.
_ALIKE = 0.75
# Prefixes of distinctive names, and those with which variables of other software in an inventory begin as well.
_OWN_PREFIXES = ("cleanup_", "drain_", "explain_", "migrate_", "rollback_", "service_proxy_")
_COMMON_PREFIXES = ("agent_", "kernel_", "proxy_", "report_", "schedule_", "verify_")
# Variables that name an API server, of which the cluster's state is read unless a file is named.
_API_SERVERS = ("service_proxy_kubeconfig", "service_proxy_context", "service_proxy_api_host")
# What a value is not. Ansible's own words are about types of Python.
_KINDS = {"bool": "true or false", "float": "a number", "int": "a whole number"}
_PREFIX = re.compile(rf"(?:{'|'.join(_OWN_PREFIXES + _COMMON_PREFIXES)})?_?")
_OWN_OR_INTERNAL = re.compile(rf"_*(?:{'|'.join(_OWN_PREFIXES + _COMMON_PREFIXES)})")
#: What Ansible evaluates before it loads the variables of an inventory, where it has no effect.
BEFORE_INVENTORY = ("proxy_hosts", "proxy_max_fail_percentage", "proxy_serial")
#: The variables that give a field of the configuration, strongest first, as the template of the documents has it.
_PRECEDENCE = {
    "mode": ("agent_configuration", "service_proxy_mode", "service_proxy_configuration"),
    "behaviour": ("agent_node_configuration", "service_proxy_behaviour", "service_proxy_node_configuration"),
    "ipvsFilterBackend": (
        "agent_node_configuration",
        "service_proxy_ipvs_filter_backend",
        "service_proxy_node_configuration",
    ),
}


def skipped_checks(skipped: Iterable[str]) -> str:
    """Return a line if tags of --skip-tags skip the first tasks, whose tag is always; empty text if not."""
    found = [tag for tag in skipped if tag in ("always", "tagged")]
    return f"--skip-tags {','.join(found)}: this skips the checks of the first tasks; skip other tags" if found else ""


class Unknown(NamedTuple):
    """A variable that does not exist; ``nearest`` is the variable that was probably meant, or empty."""

    name: str
    nearest: str

    def text(self, owner: str) -> str:
        """Return a sentence; ``owner`` is what does not have the variable."""
        meant = f"; did you mean {self.nearest}?" if self.nearest else ""
        return f"{self.name} is not a variable of {owner}{meant}"


def _read(path: Path) -> Any:
    # Only the controller needs it, where Ansible has it.
    import yaml

    return yaml.safe_load(path.read_text(encoding="utf-8"))


def known_variables(role: Path) -> frozenset[str]:
    """Return the variables of a role: options of all its entry points, defaults, and constants."""
    known: set[str] = set(role_options(role))
    for folder in ("defaults", "vars"):
        path = role / folder / "main.yml"
        if path.exists():
            known.update(_read(path) or {})
    return frozenset(known)


def role_options(role: Path) -> dict[str, dict[str, Any]]:
    """Return the options of all entry points of a role by name, as Ansible describes arguments."""
    found: dict[str, dict[str, Any]] = {}
    for entry in _read(role / "meta" / "argument_specs.yml")["argument_specs"].values():
        found.update(entry.get("options", {}))
    return found


def options_of(collection: Path) -> dict[str, dict[str, Any]]:
    """Return the options of all roles and playbooks by name, as Ansible describes arguments."""
    found = dict(_read(collection / "meta" / "playbook-options.yml"))
    for path in sorted((collection / "roles").glob("*/meta/argument_specs.yml")):
        found.update(role_options(path.parents[1]))
    return found


def invalid_values(
    variables: Mapping[str, Any], options: Mapping[str, dict[str, Any]], validator: Callable[[dict[str, Any]], Any]
) -> list[str]:
    """Return a line for each variable whose value is not of its type or one of its choices, in order of their names.

    A path on hosts is absolute, since files below an empty one would lie in the root directory. It may be empty if it
    is by default.

    ``validator`` is Ansible's ArgumentSpecValidator. Templates are not evaluated. Ansible's own error for a role
    contains the whole specification of that, and filters of playbooks take words that they do not know for false or 0.
    """
    found = []
    for name in sorted(options.keys() & variables.keys()):
        value, option = variables[name], options[name]
        type_of, choices, is_text = option.get("type", "str"), option.get("choices"), isinstance(value, str)
        if "{{" in str(value) or "{%" in str(value):
            continue
        if choices and is_text and value not in choices:
            known = [choice for choice in choices if choice]
            near = difflib.get_close_matches(value, known, 1)
            meant = f"; did you mean {near[0]}?" if near else ""
            found.append(f"{name}: {value!r} is not one of {', '.join(known)}{meant}")
        elif name == "proxy_serial":
            found += _invalid_serial(value)
        elif type_of == "path" and is_text and value != option["default"] and not value.startswith(("/", "~", "$")):
            found.append(f"{name}: {value!r} is not an absolute path")
        elif (is_text or value is None) and (type_of == "list" or (type_of == "dict" and value != "")):
            # Ansible reads a text where it validates one, but does not pass on what it has read.
            kind, form = ("list", "[...]") if type_of == "list" else ("mapping", "{...}")
            hint = f"on the command line, pass JSON: -e '{{\"{name}\": {form}}}'"
            found.append(f"{name}: {value!r} is not a {kind}; {hint}")
        else:
            checked = validator({name: option}).validate({name: value})
            wrong = checked.error_messages or _unacceptable(name, checked.validated_parameters[name])
            if type_of in _KINDS and checked.error_messages:
                wrong = [f"{str(value)!r} is not {_KINDS[type_of]}"]
            found += [f"{name}: {error}" for error in wrong]
    return found


def lonely(variables: Mapping[str, Any]) -> list[str]:
    """Return a line for each variable without another one that it needs; the agent would skip what they define."""
    alone = variables.get("service_proxy_api_servers") and not variables.get("service_proxy_api_address")
    return ["service_proxy_api_servers: needs service_proxy_api_address, at which they are served"] if alone else []


def without_effect(variables: Mapping[str, Any]) -> list[str]:
    """Return a line for each setting that another variable with another value overrides."""
    found = []
    for field, names in _PRECEDENCE.items():
        given = []
        for name in names:
            value = variables.get(name)
            place, value = (f"{name}.{field}", value.get(field)) if isinstance(value, Mapping) else (name, value)
            # A text with an expression is not known before it is evaluated.
            if isinstance(value, str) and value and "{{" not in value:
                given.append((place, value))
        found += [
            f"{place}: {value} has no effect, since {given[0][0]} is {given[0][1]}"
            for place, value in given[1:]
            if value != given[0][1]
        ]
    return found


def _unacceptable(name: str, value: Any) -> list[str]:
    """Return why numbers are out of their ranges, or a text wrong: a value, those in a dict, or in dicts of a list."""
    if isinstance(value, dict):
        return [f"{key}: {reason}" for key, item in value.items() for reason in _unacceptable(f"_{key}", item)]
    if isinstance(value, list):
        return [reason for item in value if isinstance(item, dict) for reason in _unacceptable(name, item)]
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return []
    reason = unacceptable(_PREFIX.sub("", name, count=1), value)
    return [reason] if reason else []


def _invalid_serial(value: Any) -> list[str]:
    """Return a line if a value of proxy_serial, which Ansible evaluates itself, is no number of hosts or percentage."""
    for item in value if isinstance(value, list) else [value]:
        number = re.fullmatch(r"0*([1-9][0-9]*)(%?)", str(item).strip())
        if number is None or (number[2] and int(number[1]) > 100):
            return [f"proxy_serial: {item!r} is neither a number of hosts, from 1, nor a percentage such as 25%"]
    return []


def absolute_path(path: str) -> str:
    """Return a path of the controller, where a relative one refers to the directory in which Ansible was started."""
    return os.path.join(os.getcwd(), os.path.expanduser(path))


def unusable_files(files: Sequence[str], written: Sequence[str], value_of: Callable[[str], Any]) -> list[str]:
    """Return a line for each variable that names a file that cannot be read, or one of ``written`` that cannot be made.

    Also for the file of a configuration that is none, in the words of the agent, and for variables that name a file and
    an API server as the source of the cluster's state.

    ``files``: their names, those of directories with a slash at the end, those of absolute paths with one at the start.
    ``value_of``: returns the value of a variable.
    """
    found = []
    if "service_proxy_snapshot" in files and value_of("service_proxy_snapshot"):
        others = [name for name in _API_SERVERS if value_of(name)]
        found += [f"service_proxy_snapshot and {name} exclude each other: set one of them" for name in others]
    for number, item in enumerate((*files, *written)):
        name = item.strip("/")
        value = str(value_of(name) or "")
        if not {"\n", "{"}.isdisjoint(value):
            found.append(f"{name}: it is a document (which is not shown), and must be the path of one")
            continue
        path = Path(absolute_path(value))
        verb = "read" if number < len(files) else "written"
        try:
            if value and item.startswith("/") and not Path(value).expanduser().is_absolute():
                found.append(f"{name}: {value} is not an absolute path")
            elif value and number >= len(files):
                if not item.endswith("/"):
                    # Only directories are made.
                    path.parent.stat()
                    if path.is_dir():
                        raise IsADirectoryError(EISDIR, os.strerror(EISDIR))
                check_room(str(path / "any" if item.endswith("/") else path))
            elif value and item.endswith("/"):
                next(path.iterdir(), None)
            elif value:
                content = path.read_bytes()
                if name == "agent_configuration_file":
                    parse_documents(content, [])
                elif name == "agent_kubeconfig":
                    read_choice(str(path))
        except OSError as error:
            found.append(f"{name}: {path} on the controller cannot be {verb}: {error.strerror}")
        except ConfigurationError as error:
            # The second file is named already.
            found.append(f"{path if name == 'agent_configuration_file' else name}: {error}")
    return found


def unknown_variables(names: Iterable[str], prefix: str, known: frozenset[str]) -> list[Unknown]:
    """Return the names with the prefix that are not known, sorted."""
    suffixes = {name[len(prefix) :]: name for name in sorted(known) if name.startswith(prefix)}
    found = []
    for name in sorted(set(names) - known):
        if name.startswith(prefix):
            near = difflib.get_close_matches(name[len(prefix) :], suffixes, 1, _ALIKE)
            found.append(Unknown(name, suffixes[near[0]] if near else ""))
    return found


def collection_variables(collection: Path) -> frozenset[str]:
    """Return the variables of all roles, and those of the playbooks: the words with their prefixes in their text."""
    word = re.compile(rf"\b(?:{'|'.join(_OWN_PREFIXES + _COMMON_PREFIXES)})[a-z_]+\b")
    texts = [path.read_text(encoding="utf-8") for path in (collection / "playbooks").rglob("*.yml")]
    return frozenset(name for text in texts for name in word.findall(text)).union(
        *(known_variables(path.parents[1]) for path in (collection / "roles").glob("*/meta/argument_specs.yml"))
    )


def unknown_extra(names: frozenset[str], known: frozenset[str]) -> list[Unknown]:
    """Return which extra variables with a prefix of this collection it does not have."""
    # The variables of the playbook report begin with proxy_report_.
    short = [Unknown(name, f"proxy_{name}") for name in sorted(names) if f"proxy_{name}" in known]
    rest = names.difference(found.name for found in short)
    return short + [
        found for prefix in _OWN_PREFIXES + _COMMON_PREFIXES for found in unknown_variables(rest, prefix, known)
    ]


def unknown_in_inventory(names: frozenset[str], known: frozenset[str]) -> list[Unknown]:
    """Return which variables of an inventory, with a prefix that only this collection uses, it does not have."""
    return [found for prefix in _OWN_PREFIXES for found in unknown_variables(names, prefix, known)]


def answered_variables(variables: Mapping[str, Any]) -> list[str]:
    """Return which variables of this collection a host has set by its answers, from all variables of a task, sorted.

    Ansible makes a variable of each fact in the result of any module, and it wins over the inventory and defaults.
    """
    facts = variables.get("ansible_facts") or ()
    # Facts that the module setup collects are variables with another prefix. kernel_version is the only one without it
    # that has a prefix of this collection, which other software in an inventory may have as well.
    return sorted(
        name for name in facts if name in variables and _OWN_OR_INTERNAL.match(name) and name != "kernel_version"
    )
