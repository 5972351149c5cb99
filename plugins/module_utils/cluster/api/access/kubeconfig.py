# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Reading kubeconfig files: the checked cluster and user of a context, with absolute paths.

The oracle is kubectl: what it accepts has the same effect here, and what it refuses is refused. So several files are
merged, the first one that sets a name or the current context wins, and files that do not exist are skipped.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
from typing import Any, NamedTuple, Optional

from ....base.errors import ConfigurationError, errors_as

_MAXIMUM_BYTES = 16 << 20
#: Fields that hold paths, relative to the directory of the kubeconfig file.
_PATHS = ("certificate-authority", "client-certificate", "client-key", "tokenFile")
#: What a field holds: one of these, a list with the form of its items, or an object with the forms of its fields.
#: An object with the field "*" has others, too, of that form.
_TEXT, _FLAG, _DATA, _ANYTHING = "a string", "true or false", "base64", ""
_EXTENSIONS = [{"name": _TEXT, "extension": _ANYTHING}]
_CLUSTER = {
    **dict.fromkeys(("server", "tls-server-name", "certificate-authority", "proxy-url"), _TEXT),
    **dict.fromkeys(("insecure-skip-tls-verify", "disable-compression"), _FLAG),
    "certificate-authority-data": _DATA,
    "extensions": _EXTENSIONS,
}
_EXEC = {
    **dict.fromkeys(("apiVersion", "command", "installHint", "interactiveMode"), _TEXT),
    "args": [_TEXT],
    "env": [{"name": _TEXT, "value": _TEXT}],
    "provideClusterInfo": _FLAG,
}
_USER = {
    **dict.fromkeys(("client-certificate", "client-key", "token", "tokenFile", "username", "password"), _TEXT),
    **dict.fromkeys(("client-certificate-data", "client-key-data"), _DATA),
    "as": _TEXT,
    "as-uid": _TEXT,
    "as-groups": [_TEXT],
    "as-user-extra": {"*": [_TEXT]},
    "auth-provider": {"name": _TEXT, "config": {"*": _TEXT}},
    "exec": _EXEC,
    "extensions": _EXTENSIONS,
}
_CONTEXT = {"cluster": _TEXT, "user": _TEXT, "namespace": _TEXT, "extensions": _EXTENSIONS}
_DOCUMENT = {
    **dict.fromkeys(("kind", "apiVersion", "current-context"), _TEXT),
    "preferences": {"colors": _FLAG, "extensions": _EXTENSIONS},
    "extensions": _EXTENSIONS,
    "clusters": [{"name": _TEXT, "cluster": _CLUSTER}],
    "users": [{"name": _TEXT, "user": _USER}],
    "contexts": [{"name": _TEXT, "context": _CONTEXT}],
}


class Choice(NamedTuple):
    """The cluster and the user of one context: known fields of the right type, without those that are null.

    ``files``: the paths of the files that exist.
    """

    cluster: dict[str, Any]
    user: dict[str, Any]
    context: str
    files: str


def default_files() -> str:
    """Return the kubeconfig that kubectl reads by default: ``KUBECONFIG``, else ``~/.kube/config``."""
    return os.environ.get("KUBECONFIG") or os.path.join("~", ".kube", "config")


def read_choice(files: str, context: str = "") -> Choice:
    """Return the cluster and user of a context of the kubeconfig; an empty ``context`` means the current one.

    ``files``: paths joined by colons. Raises ConfigurationError, naming the file and the field.
    """
    merged: dict[str, dict[str, dict[str, Any]]] = {"clusters": {}, "users": {}, "contexts": {}}
    current = context
    read = [(path, _read(path)) for path in (os.path.expanduser(part) for part in files.split(os.pathsep) if part)]
    documents = [(path, document) for path, document in read if document is not None]
    if not documents:
        raise ConfigurationError(f"{files}: the kubeconfig does not exist")
    for path, document in documents:
        folder = os.path.dirname(os.path.abspath(path))
        for section, known in merged.items():
            for name, entry in _entries(document, section, path).items():
                known.setdefault(name, _absolute(entry, folder))
        current = current or document.get("current-context", "")
    if not current:
        raise ConfigurationError(f"{files}: the kubeconfig has no current-context")
    chosen = merged["contexts"].get(current)
    if chosen is None:
        raise ConfigurationError(f"{files}: the kubeconfig has no context {current!r}")
    cluster, user = chosen.get("cluster", ""), chosen.get("user", "")
    if cluster not in merged["clusters"]:
        raise ConfigurationError(f"{files}: context {current!r}: the kubeconfig has no cluster {cluster!r}")
    if user and user not in merged["users"]:
        raise ConfigurationError(f"{files}: context {current!r}: the kubeconfig has no user {user!r}")
    existing = os.pathsep.join(path for path, _document in documents)
    return Choice(merged["clusters"][cluster], merged["users"].get(user, {}), current, existing)


def _read(path: str) -> Optional[dict[str, Any]]:
    """Return the content of a file, None if it does not exist. Raises ConfigurationError."""
    try:
        with open(path, "rb") as file:
            content = file.read(_MAXIMUM_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigurationError(f"{path}: the kubeconfig cannot be read: {error.strerror}") from error
    if len(content) > _MAXIMUM_BYTES:
        raise ConfigurationError(f"{path}: the kubeconfig is larger than {_MAXIMUM_BYTES >> 20} MiB")
    document = _parse(content, path)
    with errors_as(ConfigurationError, f"{path}: is not a valid kubeconfig", ValueError):
        checked: dict[str, Any] = _checked({} if document is None else document, _DOCUMENT, "")
        if (checked.get("kind") or "Config", checked.get("apiVersion") or "v1") != ("Config", "v1"):
            raise ValueError("its kind is not Config of version v1")
    return checked


def _checked(value: Any, form: Any, where: str) -> Any:
    """Return a value with the fields of a form and its data decoded. Raises ValueError, which names the field."""
    place = where.lstrip(".") or "it"
    if isinstance(form, dict):
        if not isinstance(value, dict):
            raise ValueError(f"{place} is not an object")
        forms = {str(name): form["*"] for name in value} if "*" in form else form
        return {
            name: _checked(value[name], inner, f"{where}.{name}")
            for name, inner in forms.items()
            if value.get(name) is not None
        }
    if isinstance(form, list):
        if not isinstance(value, list):
            raise ValueError(f"{place} is not a list")
        empty: Any = {} if isinstance(form[0], dict) else ""
        return [
            _checked(empty if item is None else item, form[0], f"{where}[{index}]") for index, item in enumerate(value)
        ]
    if form != _ANYTHING and not isinstance(value, bool if form == _FLAG else str):
        raise ValueError(f"{place} is not {form if form == _FLAG else _TEXT}")
    if form == _DATA:
        try:
            # As in Go, lines may be broken, but blanks are refused.
            return base64.b64decode(value.replace("\n", "").replace("\r", ""), validate=True)
        except (binascii.Error, ValueError) as error:
            raise ValueError(f"{place} is not base64") from error
    return value


def _parse(content: bytes, path: str) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        # Most kubeconfigs are YAML. PyYAML is imported only for those.
        pass
    with errors_as(ConfigurationError, f"{path}: is not JSON, and reading YAML needs PyYAML", ImportError):
        import yaml
    try:
        return _loader(yaml)(content).get_data()
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        # Omit the parser's message: it may quote a line that contains a secret.
        where = f" at line {mark.line + 1} column {mark.column + 1}" if mark is not None else ""
        raise ConfigurationError(f"{path}: the kubeconfig is not valid YAML{where}") from error


def _loader(yaml: Any) -> Any:
    """Return a class that loads YAML with the types of JSON, as kubectl does: dates and unknown tags are text."""
    loader: Any = type("Loader", (getattr(yaml, "CSafeLoader", yaml.SafeLoader),), {})
    for tag in ("!", "tag:yaml.org,2002:timestamp"):
        loader.add_multi_constructor(tag, lambda found, _suffix, node: found.construct_scalar(node))
        loader.add_constructor(tag, lambda found, node: found.construct_scalar(node))
    binary = "tag:yaml.org,2002:binary"
    loader.add_constructor(binary, lambda found, node: found.construct_yaml_binary(node).decode("utf-8", "replace"))
    return loader


def _entries(document: dict[str, Any], section: str, path: str) -> dict[str, dict[str, Any]]:
    """Return the entries of a section (``clusters`` holds ``{name: ..., cluster: {...}}``) by name."""
    found: dict[str, dict[str, Any]] = {}
    for item in document.get(section, []):
        name = item.get("name", "")
        if name in found:
            raise ConfigurationError(f"{path}: is not a valid kubeconfig: {section} has the name {name!r} twice")
        found[name] = item.get(section[:-1], {})
    return found


def _absolute(entry: dict[str, Any], folder: str) -> dict[str, Any]:
    """Return an entry whose paths are absolute; a command without a slash is searched in ``PATH``."""
    paths: dict[str, Any] = {
        name: os.path.normpath(os.path.join(folder, entry[name])) for name in _PATHS if entry.get(name)
    }
    if os.sep in entry.get("exec", {}).get("command", ""):
        paths["exec"] = {**entry["exec"], "command": os.path.join(folder, entry["exec"]["command"])}
    return {**entry, **paths}
