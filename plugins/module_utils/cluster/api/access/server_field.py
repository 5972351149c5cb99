# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The field ``server`` of a kubeconfig's current context: read it, and replace it without touching anything else.

Comments, order and quoting of the rest of the file are kept, because kubeadm and people edit the same file. Needs
PyYAML, also for a kubeconfig in JSON.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from ....base.errors import ConfigurationError, errors_as


class ServerField(NamedTuple):
    """The URL in the field, and the position of its first character and of the one after its last in the text."""

    url: str
    start: int
    end: int
    quoted: bool


def server_field(text: str, path: str) -> ServerField:
    """Return where the current context's server is in a kubeconfig. Raises ConfigurationError.

    ``path`` names the file in errors, which never quote its content.
    """
    yaml = _yaml(path)
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        document = yaml.load(text, Loader=yaml.SafeLoader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"{path}: the kubeconfig is not valid YAML") from error
    name = _current_cluster(document, path)
    for entry in _items(_member(root, "clusters")):
        if _text(_member(entry, "name")) == name:
            found = _member(_member(entry, "cluster"), "server")
            if found is not None and isinstance(found.value, str) and found.value:
                quoted = found.style is not None
                return ServerField(found.value, found.start_mark.index, found.end_mark.index, quoted)
    raise ConfigurationError(f"{path}: cluster {name!r} of the kubeconfig has no server")


def with_server(text: str, url: str, path: str) -> str:
    """Return the text of a kubeconfig with another server in its current context. Raises ConfigurationError."""
    yaml = _yaml(path)
    found = server_field(text, path)
    # A colon or bracket in a plain scalar means something else in flow style.
    written = json.dumps(url) if found.quoted or "[" in url else url
    changed = text[: found.start] + written + text[found.end :]
    expected = yaml.load(text, Loader=yaml.SafeLoader)
    name = _current_cluster(expected, path)
    entry = next(entry for entry in expected["clusters"] if entry["name"] == name)
    entry["cluster"] = {**entry["cluster"], "server": url}
    try:
        alone = yaml.load(changed, Loader=yaml.SafeLoader) == expected
    except yaml.YAMLError:
        # The field had an anchor, to which an alias elsewhere refers.
        alone = False
    if not alone:
        raise ConfigurationError(f"{path}: the server cannot be replaced alone, because other fields refer to it")
    return changed


def _yaml(path: str) -> Any:
    with errors_as(ConfigurationError, f"{path}: changing a kubeconfig needs PyYAML", ImportError):
        import yaml
    return yaml


def _current_cluster(document: Any, path: str) -> str:
    """Return the name of the current context's cluster. Raises ConfigurationError."""
    if isinstance(document, dict):
        for entry in _dictionaries(document.get("contexts")):
            context = entry.get("context")
            if entry.get("name") == document.get("current-context") and isinstance(context, dict):
                return str(context.get("cluster") or "")
    raise ConfigurationError(f"{path}: the kubeconfig has no current context")


def _dictionaries(value: Any) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _items(node: Any) -> list[Any]:
    return list(node.value) if node is not None and node.id == "sequence" else []


def _member(node: Any, name: str) -> Any:
    """Return the node of a mapping's key, None if there is none."""
    if node is None or node.id != "mapping":
        return None
    return next((value for key, value in node.value if key.value == name), None)


def _text(node: Any) -> str:
    return str(node.value) if node is not None and node.id == "scalar" else ""
