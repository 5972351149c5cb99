# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Static Services: Service and EndpointSlice manifests in a directory of the node, served without a cluster.

They are parsed and validated like objects of the cluster. An unusable manifest is refused by file, object and field,
and does not affect the others.
"""

from __future__ import annotations

import os
from typing import Any, Iterable, Iterator, Mapping, NamedTuple, Optional, Sequence, Union

from ...base.errors import Refusal, SnapshotError, defect_text
from ...base.regular_files import read_with_own_links
from ..fields import Invalid, shown
from ..model import EndpointSlice, NamespacedName, Service
from ..parsing.health_check import ANNOTATIONS as CHECK_ANNOTATIONS
from ..parsing.health_check import CHECK
from ..parsing.objects import ObjectKey, is_supported, object_key, parse_object
from ..parsing.service import LABELS
from ..parsing.service_policy import PREFIX, SERVICE_ANNOTATIONS
from ..parsing.weight import WEIGHT
from .manifest_fields import check_endpoint_fields, check_fields
from .snapshot import parse_snapshot

#: The default namespace of manifests.
DEFAULT_NAMESPACE = "static"
#: The kind of the refusal of a file as a whole; its path is the name.
UNREADABLE_FILE = "file"
_SUFFIXES = (".yaml", ".yml", ".json")
_MOST_BYTES = 1 << 20
_MOST_FILES = 256
#: The labels and annotations with the collection's prefix that have a meaning, by kind.
_NAMES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "Service": {"labels": LABELS, "annotations": (*CHECK_ANNOTATIONS, *SERVICE_ANNOTATIONS)},
    "EndpointSlice": {"labels": (), "annotations": (WEIGHT,)},
}

Problem = tuple[str, str]
"""The field of a manifest that is not used, and the reason."""
Slices = dict[NamespacedName, dict[str, EndpointSlice]]
Signature = tuple[tuple[str, int, int, int, int], ...]


class StaticObjects(NamedTuple):
    """The static Services by name, their EndpointSlices by Service and name, and the refusals."""

    services: Mapping[NamespacedName, Service] = {}
    slices: Mapping[NamespacedName, Mapping[str, EndpointSlice]] = {}
    refusals: tuple[Refusal, ...] = ()


def parse_static(files: Mapping[str, Sequence[Any]], refusals: Iterable[Refusal] = ()) -> StaticObjects:
    """Return the static Services of raw objects, given by file; ``refusals`` are added to those found.

    An object without a namespace is in DEFAULT_NAMESPACE. Of several objects with one kind and name, the first counts.
    """
    services: dict[NamespacedName, Service] = {}
    slices: list[tuple[str, EndpointSlice]] = []
    found = list(refusals)
    seen: dict[ObjectKey, str] = {}
    selecting: dict[NamespacedName, ObjectKey] = {}
    for file, objects in files.items():
        for given in objects:
            if not isinstance(given, dict):
                found.append(Refusal("object", "", "", "", f"{shown(given)} is not an object")._replace(source=file))
                continue
            raw = _with_namespace(given)
            key = object_key(raw)
            if key in seen:
                problem = ("metadata.name", f"is already that of another {key.kind}, in {seen[key]}")
                found.append(Refusal(*key, *problem, file))
                continue
            parsed, problems = _isolated(raw)
            found += [Refusal(key.kind or "object", key.namespace, key.name, *problem, file) for problem in problems]
            if parsed is None:
                continue
            seen[key] = file
            if isinstance(parsed, EndpointSlice):
                slices.append((file, parsed))
                continue
            services[parsed.key] = parsed._replace(static=file)
            if raw["spec"].get("selector"):
                selecting[parsed.key] = key
    by_owner: Slices = {}
    for file, item in slices:
        mismatch = _mismatch(item, services.get(item.service_key))
        if mismatch is None:
            by_owner.setdefault(item.service_key, {})[item.name] = item
        else:
            found.append(Refusal("EndpointSlice", item.namespace, item.name, *mismatch, file))
    reason = "selects no pods; EndpointSlices name the endpoints of a static Service"
    for name, key in selecting.items():
        if name not in by_owner:
            found.append(Refusal(*key, "spec.selector", reason, services[name].static))
    return StaticObjects(services, by_owner, tuple(found))


def _isolated(raw: dict[str, Any]) -> tuple[Union[Service, EndpointSlice, None], list[Problem]]:
    """Return what :func:`_parse` does; a manifest that a defect of the parser does not let it read is refused."""
    try:
        return _parse(raw)
    except MemoryError:
        raise
    except RecursionError:
        return None, [("", "is nested too deeply, or contains itself")]
    except Exception as error:
        return None, [("", f"cannot be read, which is a defect of this program: {defect_text(error)}")]


def _parse(raw: dict[str, Any]) -> tuple[Union[Service, EndpointSlice, None], list[Problem]]:
    """Return the object of a manifest, None if it is refused; and its problems, or those of parts that are skipped."""
    kind = object_key(raw).kind
    if kind not in _NAMES:
        return None, [("kind", f"{'is not' if kind else 'is missing; it must be'} Service or EndpointSlice")]
    skipped: list[Refusal] = []
    usable, problems = _without_invalid_endpoints(raw)
    parsed = parse_object(usable, skipped)
    if not is_supported(raw) or (isinstance(parsed, Refusal) and parsed.field == "apiVersion"):
        # Another type, or another version of it, has other fields.
        return None, [(parsed.field, parsed.reason) if isinstance(parsed, Refusal) else _unused(raw)]
    try:
        check_fields(raw)
    except Invalid as error:
        return None, [(error.field, error.reason)]
    problems += [(refusal.field, refusal.reason) for refusal in skipped]
    if isinstance(parsed, Refusal):
        return None, [(parsed.field, parsed.reason)]
    if not isinstance(parsed, (Service, EndpointSlice)):
        return None, [_unused(raw)]
    if isinstance(parsed, Service) and not parsed.ports:
        return None, [("spec.ports", "is missing; without ports nothing is served")]
    return parsed, [*problems, *_useless_names(raw)]


def _with_namespace(raw: dict[str, Any]) -> dict[str, Any]:
    metadata = raw.get("metadata") or {}
    if not isinstance(metadata, dict) or metadata.get("namespace"):
        return raw
    return {**raw, "metadata": {**metadata, "namespace": DEFAULT_NAMESPACE}}


def _mismatch(item: EndpointSlice, owner: Optional[Service]) -> Optional[Problem]:
    """Return the field that keeps a slice from giving its Service endpoints, and the reason; None if it gives some."""
    if owner is None:
        return "metadata.labels", f"there is no static Service {item.service_key}"
    wanted = {(port.name, port.protocol) for port in owner.ports}
    if wanted & {(port.name, port.protocol) for port in item.ports}:
        return None
    names = ", ".join(f"{shown(name)} ({protocol})" for name, protocol in sorted(wanted))
    return "ports", f"none has the name and protocol of a port of Service {item.service_key}: {names}"


def _useless_names(raw: dict[str, Any]) -> Iterator[Problem]:
    """Yield the labels and annotations of a valid object with the collection's prefix that have no effect."""
    for field, known in _NAMES[raw["kind"]].items():
        names = raw["metadata"].get(field)
        given = [name for name in names if str(name).startswith(PREFIX)] if isinstance(names, dict) else []
        for name in given:
            if name not in known:
                yield f"metadata.{field}[{name}]", "is unknown"
            elif name in CHECK_ANNOTATIONS and CHECK not in given:
                yield f"metadata.{field}[{name}]", f"has no effect without the annotation {CHECK}"


def _without_invalid_endpoints(raw: dict[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """Return a manifest in which endpoints with unknown fields are empty, and the problems of empty endpoints."""
    endpoints = raw.get("endpoints")
    if not isinstance(endpoints, list):
        return raw, []
    problems: list[Problem] = []
    kept = list(endpoints)
    for index, endpoint in enumerate(endpoints):
        try:
            check_endpoint_fields(endpoint, index)
        except Invalid as error:
            # An endpoint without an address is not served.
            kept[index] = {}
            problems.append((error.field, error.reason))
        else:
            if isinstance(endpoint, dict) and not endpoint.get("addresses"):
                problems.append((f"endpoints[{index}].addresses", "is missing"))
    return {**raw, "endpoints": kept}, problems


def _unused(raw: dict[str, Any]) -> Problem:
    """Return the field that prevents a valid object from being served, and the reason."""
    if not is_supported(raw):
        return "apiVersion", f"{shown(raw.get('apiVersion'))} is not that of a {raw['kind']} of Kubernetes"
    if raw["kind"] == "EndpointSlice":
        if raw.get("addressType") == "FQDN":
            return "addressType", "endpoints must have addresses of type IPv4 or IPv6"
        return "metadata.labels", "kubernetes.io/service-name must name the static Service of the endpoints"
    spec = raw.get("spec") or {}
    if spec.get("type") == "ExternalName":
        return "spec.type", "an ExternalName has no address to be served at"
    if spec.get("clusterIP") == "None":
        return "spec.clusterIP", "a headless Service has no address to be served at"
    if not spec.get("clusterIP"):
        return "spec.clusterIP", "is missing; there is no API server to assign one"
    return "metadata.labels", "service.kubernetes.io/service-proxy-name assigns it to another proxy"


class StaticDirectory:
    """The manifests in a directory, read again when they change.

    ``replaced``: objects by the name of the file that they replace, which is then not read.
    """

    def __init__(self, path: str, replaced: Optional[Mapping[str, Sequence[Any]]] = None) -> None:
        self.path = path
        self._replaced = {os.path.join(path, name): objects for name, objects in (replaced or {}).items()}
        self._last: dict[str, Sequence[Any]] = {}
        self._seen: Optional[Signature] = None
        self._unreadable: list[str] = []

    def changed(self) -> bool:
        """Return whether a file was added, changed, removed or made readable since the last :meth:`read`."""
        return self._signature() != self._seen or any(map(_is_readable, self._unreadable))

    def read(self) -> StaticObjects:
        """Read all files, in order of their names.

        A file that cannot be read or parsed is refused. Its objects from an earlier successful read are kept, because
        an editor may be writing the file. A directory that does not exist is empty.
        """
        self._seen = self._signature()
        self._unreadable = []
        files: dict[str, Sequence[Any]] = {}
        refusals: list[Refusal] = []
        try:
            paths = self._paths()
        except OSError as error:
            refusals.append(_refused_file(self.path, error.strerror or str(error)))
            paths = list(self._last)
        for path in paths[_MOST_FILES:]:
            refusals.append(_refused_file(path, f"the directory has more than {_MOST_FILES} files"))
        for path in paths[:_MOST_FILES]:
            try:
                files[path] = parse_snapshot(read_with_own_links(path, _MOST_BYTES), path)
            except (OSError, SnapshotError) as error:
                if isinstance(error, OSError):
                    # Not every cause leaves a trace in the file's status: all file descriptors may have been in use.
                    self._unreadable.append(path)
                    reason = error.strerror or str(error)
                else:
                    reason = str(error)[len(path) + 2 :]
                kept = "; its last valid content stays in effect" if path in self._last else ""
                refusals.append(_refused_file(path, f"{reason}{kept}"))
                if kept:
                    files[path] = self._last[path]
        self._last = files
        files = {**files, **self._replaced}
        return parse_static({path: files[path] for path in sorted(files)}, refusals)

    def _paths(self) -> list[str]:
        try:
            names = os.listdir(self.path)
        except FileNotFoundError:
            return []
        manifests = [name for name in names if name.endswith(_SUFFIXES) and not name.startswith(".")]
        paths = [os.path.join(self.path, name) for name in manifests]
        return sorted(path for path in paths if path not in self._replaced)

    def _signature(self) -> Signature:
        """Return a value that differs after every change of a file; the error, if the directory cannot be read."""
        try:
            paths = self._paths()
        except OSError as error:
            return (("", error.errno or 0, 0, 0, 0),)
        found = []
        for path in paths:
            try:
                status = os.stat(path)
                found.append((path, status.st_ctime_ns, status.st_mtime_ns, status.st_size, status.st_ino))
            except OSError as error:
                found.append((path, error.errno or 0, 0, 0, 0))
        return tuple(found)


def _is_readable(path: str) -> bool:
    try:
        read_with_own_links(path, _MOST_BYTES)
    except OSError:
        return False
    return True


def _refused_file(path: str, reason: str) -> Refusal:
    return Refusal(UNREADABLE_FILE, "", path, "", reason)
