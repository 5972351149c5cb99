# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The documents of a configuration file: a KubeProxyConfiguration, and perhaps a NodeProxyConfiguration.

kube-proxy reads the first document of a file only, so a file that starts with the KubeProxyConfiguration can be given
to kube-proxy unchanged. A configuration is converted back to that form for /configz and for rendered files.
"""

from __future__ import annotations

import json
from typing import Any, Callable, Mapping, NamedTuple, Union

from ..base.errors import ConfigurationError, errors_as
from ..cluster.fields import shown
from . import node_proxy
from .field import value_of
from .fields import FIELDS
from .model import API_VERSION, KIND, KubeProxyConfiguration


def to_mapping(configuration: KubeProxyConfiguration) -> dict[str, Any]:
    """Return the configuration as a KubeProxyConfiguration v1alpha1 object in JSON types, with all defaults filled in.

    Loading the result gives the same configuration.
    """
    found: dict[str, Any] = {"apiVersion": API_VERSION, "kind": KIND, "featureGates": dict(configuration.feature_gates)}
    for field in FIELDS:
        if field.kind:
            section, _dot, name = field.name.rpartition(".")
            fields = found.setdefault(section, {}) if section else found
            fields[name] = field.kind.to_json(value_of(configuration, field.attribute))
    found["logging"].update(configuration.logging.rest)
    found["nodePortAddresses"] = list(configuration.effective_node_port_addresses)
    return found


_KIND = "KubeProxyConfiguration"
_Construct = Callable[[list[tuple[Any, Any]]], dict[Any, Any]]


class Documents(NamedTuple):
    """The fields of both documents; ``node_proxy`` is empty if the file has no NodeProxyConfiguration."""

    kube_proxy: Mapping[str, Any]
    node_proxy: Mapping[str, Any]


def parse_documents(source: Union[str, bytes], warnings: list[str]) -> Documents:
    """Return the documents of a file in YAML or JSON, and add a line to ``warnings`` for each duplicate field.

    Raises ConfigurationError if the text cannot be parsed or has other documents.
    """
    try:
        text = source.decode("utf-8-sig") if isinstance(source, bytes) else source
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{_KIND}: not UTF-8 text at byte {error.start}") from error
    found: list[str] = []

    def note_duplicates(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
        result: dict[Any, Any] = {}
        for name, value in pairs:
            if name in result:
                found.append(f"duplicate field {shown(name)}; the last one counts")
            result[name] = value
        return result

    try:
        documents = [json.loads(text, object_pairs_hook=note_duplicates)]
    except (ValueError, RecursionError):
        found.clear()
        documents = _parse_yaml(text, note_duplicates)
    # A duplicate may be at any depth, where the parser does not know the document's kind.
    kind = _KIND if len(documents) == 1 else f"{_KIND} or {node_proxy.KIND}"
    warnings += [f"{kind}: {line}" for line in found]
    return _by_kind(documents)


def check_type(values: Mapping[str, Any], kind: str, api_version: str) -> None:
    """Raise ConfigurationError unless a document has this kind and apiVersion."""
    for name, expected in (("kind", kind), ("apiVersion", api_version)):
        value = values.get(name)
        if value is None or value == "":
            raise ConfigurationError(f"{kind}: {name}: is missing; it must be {expected}")
        if value != expected:
            raise ConfigurationError(f"{kind}: {name}: {shown(value)} is not {expected}")


def _by_kind(documents: list[Any]) -> Documents:
    if not documents:
        raise ConfigurationError(f"{_KIND}: is empty")
    own: list[Mapping[str, Any]] = []
    others: list[Mapping[str, Any]] = []
    for document in documents:
        if not isinstance(document, dict):
            raise ConfigurationError(f"{_KIND}: {shown(document)} is not an object with fields")
        (own if document.get("kind") == node_proxy.KIND else others).append(document)
    for kind, found in ((_KIND, others), (node_proxy.KIND, own)):
        if len(found) > 1:
            kinds = ", ".join(shown(document.get("kind")) for document in found)
            raise ConfigurationError(f"{kind}: contains {len(found)} YAML documents instead of one, of kind {kinds}")
    if not others:
        raise ConfigurationError(f"{_KIND}: is missing; a file with only a {node_proxy.KIND} is not complete")
    if own:
        check_type(own[0], node_proxy.KIND, node_proxy.API_VERSION)
    return Documents(others[0], own[0] if own else {})


def _parse_yaml(text: str, construct: _Construct) -> list[Any]:
    with errors_as(ConfigurationError, f"{_KIND}: is not JSON, and reading YAML needs PyYAML", ImportError):
        import yaml

    class Loader(yaml.SafeLoader):
        """Report duplicate keys, and do not convert text that looks like a date."""

        yaml_implicit_resolvers = {
            first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
            for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
        }

    def construct_mapping(loader: Any, node: Any) -> Any:
        loader.flatten_mapping(node)
        pairs = []
        for key, value in node.value:
            name = loader.construct_object(key, True)
            pairs.append((name if isinstance(name, str) else str(name), loader.construct_object(value, True)))
        return construct(pairs)

    Loader.add_constructor("tag:yaml.org,2002:map", construct_mapping)
    try:
        return [item for item in yaml.load_all(text, Loader=Loader) if item is not None]
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f" at line {mark.line + 1} column {mark.column + 1}" if mark is not None else ""
        raise ConfigurationError(f"{_KIND}: not valid YAML: {error.problem or error}{where}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"{_KIND}: not valid YAML: {error}") from error
