# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Raw objects as compressed JSON, which needs a small fraction of the memory of decoded objects.

A list of all EndpointSlices is held until it is complete. Decoded, it would take more memory than everything that is
kept of it, and fragment the heap, so that it could not be returned to the system.

What objects of one kind have in common is in a dictionary, so each one compresses to a tenth in some microseconds.
"""

from __future__ import annotations

import json
import zlib
from typing import AbstractSet, Any, Callable, Iterable, Iterator, NamedTuple, Optional, Sequence, Union

from ...base.regular_files import parse_json
from ...cluster.parsing.objects import ObjectKey, ParsedObject, object_key, parsed_object

#: Made once: json.dumps makes an encoder for each call with separators. Decoded JSON contains no cycles.
_encode = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode
#: A smaller window costs more time. The dictionary has the most frequent texts at its end.
_WINDOW, _LEVEL, _MEMORY = -12, 3, 1
_COMMON = (
    b'"type":"LoadBalancer","type":"NodePort","externalTrafficPolicy":"Local","externalTrafficPolicy":"Cluster",'
    b'"nodePort":3"protocol":"UDP","ready":false,"serving":false,"terminating":true"hints":{"forZones":[{"name":"'
    b'{"apiVersion":"v1","kind":"Pod","metadata":{"namespace":"","name":"","uid":"","labels":{"app":""},'
    b'"creationTimestamp":"20"},"spec":{"nodeName":"","containers":[{"ports":[{"containerPort":8080,"protocol":"TCP"}]}]'
    b'},"status":{"phase":"Running","podIP":"10.","podIPs":[{"ip":"10."}]}}'
    b'{"apiVersion":"v1","kind":"Service","metadata":{"namespace":"","name":"","labels":{},"annotations":{},'
    b'"creationTimestamp":"202"},"spec":{"type":"ClusterIP","clusterIP":"10.96.","clusterIPs":["10.96."],'
    b'"ipFamilies":["IPv4"],"ports":[{"name":"http","protocol":"TCP","port":80}],"sessionAffinity":"None",'
    b'"internalTrafficPolicy":"Cluster"},"status":{"loadBalancer":{}}}'
    b'{"apiVersion":"discovery.k8s.io/v1","kind":"EndpointSlice","metadata":{"namespace":"","name":"",'
    b'"labels":{"kubernetes.io/service-name":""},"annotations":{"endpoints.kubernetes.io/last-change-trigger-time":"202'
    b'"}},"addressType":"IPv4","ports":[{"name":"http","protocol":"TCP","port":8080}],"endpoints":[{"addresses":["10.'
    b'"],"conditions":{"ready":true,"serving":true,"terminating":false},"nodeName":""},{"addresses":["10.'
)

#: Copied for each object: filling a compressor with the dictionary takes as long as compressing a small object.
_compressor = zlib.compressobj(level=_LEVEL, wbits=_WINDOW, memLevel=_MEMORY, zdict=_COMMON)


def text_of(raw: dict[str, Any]) -> bytes:
    """Return an object as JSON without its resourceVersion; empty if it cannot be written.

    Versions belong to one server's history, so the copy on disk does not contain them.
    """
    metadata = raw.get("metadata")
    if isinstance(metadata, dict) and "resourceVersion" in metadata:
        raw = {**raw, "metadata": {name: value for name, value in metadata.items() if name != "resourceVersion"}}
    try:
        return _encode(raw).encode()
    except (ValueError, RecursionError):
        # Nested too deeply, or with numbers too long to be written. No such object is valid, so it is not saved.
        return b""


def text_in(packed: bytes) -> bytes:
    """Return the JSON of a packed object."""
    return zlib.decompressobj(_WINDOW, _COMMON).decompress(packed) if packed else b""


class Item(NamedTuple):
    """One object.

    ``content``: compressed, or as it is if it cannot be written. ``size``: bytes of its JSON. ``parsed``: the object in
    parsed form, where that is held as well.
    """

    content: Union[bytes, dict[str, Any]]
    size: int
    parsed: Optional[ParsedObject] = None

    def decoded(self) -> dict[str, Any]:
        """Return the object."""
        if not isinstance(self.content, bytes):
            return self.content
        found: dict[str, Any] = json.loads(text_in(self.content))
        return found

    @property
    def packed(self) -> bytes:
        """The compressed JSON, empty if it cannot be written."""
        return self.content if isinstance(self.content, bytes) else b""


def pack(raw: dict[str, Any], text: bytes, parsed: Optional[ParsedObject] = None) -> Item:
    """Return an object in its small form, with the parsed one if that is given; the content of equal ones is equal.

    ``text``: as :func:`text_of` returns it.
    """
    if not text:
        return Item(raw, 0, parsed)
    compressor = _compressor.copy()
    return Item(compressor.compress(text) + compressor.flush(), len(text), parsed)


class Packed(Sequence[dict[str, Any]]):
    """A sequence of objects, each decoded whenever it is read. ``size``: bytes of JSON of all objects."""

    def __init__(self) -> None:
        self.items: list[Item] = []
        self.size = 0

    def append(self, item: Item) -> None:
        """Add an object."""
        self.items.append(item)
        self.size += item.size

    def without(self, dropped: Callable[[ParsedObject], bool]) -> Packed:
        """Return the objects that ``dropped`` does not select."""
        kept = Packed()
        for parsed, item in parsed_items(self):
            if not dropped(parsed):
                kept.append(item)
        return kept

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: Any) -> Any:
        found = self.items[index]
        return [item.decoded() for item in found] if isinstance(index, slice) else found.decoded()


def items_of(texts: Iterable[bytes], kinds: AbstractSet[str]) -> Iterator[tuple[ObjectKey, Item]]:
    """Yield the objects of these kinds among those with these texts, in parsed form as well. Raises ValueError."""
    for text in texts:
        raw = parse_json(text)
        if not isinstance(raw, dict):
            raise ValueError("it is not a list of objects")
        key = object_key(raw)
        if key.kind in kinds:
            yield key, pack(raw, text, parsed_object(raw, key))


def parsed_items(objects: Sequence[dict[str, Any]]) -> Iterator[tuple[ParsedObject, Item]]:
    """Yield each object in parsed form and in its small one."""
    if isinstance(objects, Packed):
        for item in objects.items:
            yield item.parsed or _parsed(item.decoded()), item
    else:
        for raw in objects:
            yield _parsed(raw), pack(raw, text_of(raw))


def _parsed(raw: dict[str, Any]) -> ParsedObject:
    return parsed_object(raw, object_key(raw))
