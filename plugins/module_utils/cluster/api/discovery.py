# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Whether an API server has a collection, and in which version, by the documents that list its groups and resources.

An answer of 404 alone does not prove that it has none: what is in front of the API server also gives it, such as a load
balancer that has no backend or misdirects a request. Source: k8s.io/apimachinery/pkg/apis/meta/v1 (APIGroupList,
APIResourceList).
"""

from __future__ import annotations

from typing import Any, Mapping, Optional, Protocol

from .answers import InvalidAnswer
from .errors import FORBIDDEN, NOT_FOUND, ApiStatusError, NotServed
from .resource_types import ResourceType


class Client(Protocol):
    """The part of :class:`.api.ApiClient` that is used here. ``host``: the URL of the API server."""

    host: str

    def send(self, method: str, path: str, body: Optional[Mapping[str, Any]], purpose: str) -> dict[str, Any]:
        """Send a request and return the answer. Raises ApiError."""


def served_version(
    client: Client, resource: ResourceType, failure: ApiStatusError, had_objects: bool = False
) -> Optional[ResourceType]:
    """Return a collection that could not be listed in the version in which the API server has it; None if it has none.

    A client that may not read the documents accepts the statement of an API server instead, unless the collection
    ``had_objects``: they must not be given up without proof. Raises ApiError: NotServed, or if there is no answer, or
    one that is not an API server's.
    """
    if failure.code != NOT_FOUND:
        raise failure
    try:
        return _served(client, resource, failure)
    except ApiStatusError as error:
        if error.code == FORBIDDEN and failure.says_not_found and not had_objects:
            return None
        raise


def _served(client: Client, resource: ResourceType, failure: ApiStatusError) -> Optional[ResourceType]:
    listed = _versions(client)
    known = {each.group_version: each for each in resource.versions}
    for version, each in known.items():
        try:
            if version in listed and resource.name in _resources(client, version):
                return each
        except ApiStatusError as error:
            raise failure if error.code == NOT_FOUND else error from error
    group = f"{resource.group_version.partition('/')[0]}/"
    for other in sorted(text for text in listed if isinstance(text, str) and text.startswith(group)):
        if other not in known and resource.name in _resources(client, other):
            where = f"API server {client.host}: list {resource.name}"
            raise NotServed(f"{where}: it has them in version {other}, not in {' or '.join(known)}", NOT_FOUND)
    return None


def _resources(client: Client, version: str) -> set[object]:
    """Return the names of the resources in one version of a group, ``group/version``. Raises ApiError."""
    purpose = f"list the resources of {version}"
    answer = client.send("GET", f"/apis/{version}", None, purpose)
    where = f"API server {client.host}: {purpose}"
    if answer.get("kind") != "APIResourceList" or answer.get("groupVersion") != version:
        raise InvalidAnswer(f"{where}: the answer is not the APIResourceList of {version}")
    return {item.get("name") for item in _objects(answer, "resources", where)}


def _versions(client: Client) -> set[object]:
    """Return the versions of the API server's groups, as ``group/version``. Raises ApiError."""
    purpose = "list the API groups"
    where = f"API server {client.host}: {purpose}"
    try:
        answer = client.send("GET", "/apis", None, purpose)
    except ApiStatusError as error:
        if error.code != NOT_FOUND:
            raise
        raise InvalidAnswer(f"{error}; an API server has groups, so the answer is not from one") from error
    groups = _objects(answer, "groups", where)
    if answer.get("kind") != "APIGroupList" or not groups:
        raise InvalidAnswer(f"{where}: the answer is not an APIGroupList with groups")
    return {version.get("groupVersion") for group in groups for version in _objects(group, "versions", where)}


def _objects(document: dict[str, Any], field: str, where: str) -> list[dict[str, Any]]:
    """Return a list of objects in a document. Raises InvalidAnswer."""
    found = document.get(field)
    if not isinstance(found, list) or not all(isinstance(item, dict) for item in found):
        raise InvalidAnswer(f"{where}: {field} is not a list of objects")
    return found
