# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Reading kubeconfig files: the checked cluster and user of a context, with absolute paths.

Several files are merged as by kubectl: the first file that sets a name or the current context wins.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
from typing import Any, Dict, List, NamedTuple

from ....base.errors import ConfigurationError, errors_as, os_errors

_MAXIMUM_BYTES = 16 << 20
#: Fields that hold paths, relative to the directory of the kubeconfig file.
_PATHS = ("certificate-authority", "client-certificate", "client-key", "tokenFile")


class Choice(NamedTuple):
    """The cluster and the user of one context. ``folder``: the directory to which the user's commands are relative."""

    cluster: Dict[str, Any]
    user: Dict[str, Any]
    context: str
    folder: str


def default_files() -> str:
    """Return the kubeconfig that kubectl reads by default: ``KUBECONFIG``, else ``~/.kube/config``."""
    return os.environ.get("KUBECONFIG") or os.path.join("~", ".kube", "config")


def read_choice(files: str, context: str = "") -> Choice:
    """Return the cluster and user of a context of the kubeconfig; an empty ``context`` means the current one.

    ``files``: paths joined by colons. Raises ConfigurationError, naming the file and the field.
    """
    merged: Dict[str, Dict[str, Dict[str, Any]]] = {"clusters": {}, "users": {}, "contexts": {}}
    folders: Dict[str, str] = {}
    current = context
    for path in (os.path.expanduser(part) for part in files.split(os.pathsep) if part):
        document = _read(path)
        folder = os.path.dirname(os.path.abspath(path))
        for section, known in merged.items():
            for name, entry in _entries(document, section, path).items():
                if name not in known:
                    known[name] = _absolute(entry, folder)
                    if section == "users":
                        folders[name] = folder
        current = current or text_field(document, "current-context", path)
    if not current:
        raise ConfigurationError(f"{files}: the kubeconfig has no current-context")
    chosen = merged["contexts"].get(current)
    if chosen is None:
        raise ConfigurationError(f"{files}: the kubeconfig has no context {current!r}")
    cluster, user = text_field(chosen, "cluster", files), text_field(chosen, "user", files)
    if cluster not in merged["clusters"]:
        raise ConfigurationError(f"{files}: context {current!r}: the kubeconfig has no cluster {cluster!r}")
    if user and user not in merged["users"]:
        raise ConfigurationError(f"{files}: context {current!r}: the kubeconfig has no user {user!r}")
    return Choice(merged["clusters"][cluster], merged["users"].get(user, {}), current, folders.get(user, ""))


def text_field(entry: Dict[str, Any], name: str, source: str) -> str:
    """Return a field that is a string, empty if it is absent. Raises ConfigurationError."""
    value = entry.get(name)
    if value is not None and not isinstance(value, str):
        raise ConfigurationError(f"{source}: is not a valid kubeconfig: {name} is not a string")
    return value or ""


def flag_field(entry: Dict[str, Any], name: str, source: str) -> bool:
    """Return a field that is true or false, false if it is absent. Raises ConfigurationError."""
    value = entry.get(name)
    if value is not None and not isinstance(value, bool):
        raise ConfigurationError(f"{source}: is not a valid kubeconfig: {name} is not true or false")
    return bool(value)


def data_field(entry: Dict[str, Any], name: str, source: str) -> bytes:
    """Return the bytes of a field in base64, empty if it is absent. Raises ConfigurationError."""
    try:
        return base64.b64decode("".join(text_field(entry, name, source).split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise ConfigurationError(f"{source}: is not a valid kubeconfig: {name} is not base64") from error


def _read(path: str) -> Dict[str, Any]:
    if not os.access(path, os.R_OK):
        state = "cannot be read" if os.path.exists(path) else "does not exist"
        raise ConfigurationError(f"{path}: the kubeconfig {state}")
    with os_errors(ConfigurationError, f"{path}: the kubeconfig cannot be read"), open(path, "rb") as file:
        content = file.read(_MAXIMUM_BYTES + 1)
    if len(content) > _MAXIMUM_BYTES:
        raise ConfigurationError(f"{path}: the kubeconfig is larger than {_MAXIMUM_BYTES >> 20} MiB")
    document = _parse(content, path)
    if not isinstance(document, dict):
        raise ConfigurationError(f"{path}: is not a valid kubeconfig: it is not an object")
    return document


def _parse(content: bytes, path: str) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        # Most kubeconfigs are YAML. PyYAML is imported only for those.
        pass
    with errors_as(ConfigurationError, f"{path}: is not JSON, and reading YAML needs PyYAML", ImportError):
        import yaml
    try:
        return yaml.load(content, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        # Omit the parser's message: it may quote a line that contains a secret.
        where = f" at line {mark.line + 1} column {mark.column + 1}" if mark is not None else ""
        raise ConfigurationError(f"{path}: the kubeconfig is not valid YAML{where}") from error


def _entries(document: Dict[str, Any], section: str, path: str) -> Dict[str, Dict[str, Any]]:
    """Return the entries of a section (``clusters`` holds ``{name: ..., cluster: {...}}``) by name."""
    items: List[Any] = document.get(section) or []
    if not isinstance(items, list):
        raise ConfigurationError(f"{path}: is not a valid kubeconfig: {section} is not a list")
    found: Dict[str, Dict[str, Any]] = {}
    for index, item in enumerate(items):
        entry = item.get(section[:-1]) if isinstance(item, dict) else None
        name = item.get("name") if isinstance(item, dict) else None
        if not isinstance(name, str) or not (entry is None or isinstance(entry, dict)):
            raise ConfigurationError(
                f"{path}: is not a valid kubeconfig: {section}[{index}] has no name with a {section[:-1]}"
            )
        found.setdefault(name, entry or {})
    return found


def _absolute(entry: Dict[str, Any], folder: str) -> Dict[str, Any]:
    paths = {
        name: os.path.join(folder, entry[name]) for name in _PATHS if isinstance(entry.get(name), str) and entry[name]
    }
    return {**entry, **paths}
