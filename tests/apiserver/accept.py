# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The Accept header of a request to the test API server, with KEP-5958: answers without ``metadata.managedFields``."""

from __future__ import annotations

from .failures import Failure
from .store import Object

_JSON = ("application/json", "application/*", "*/*")
_OMITTED = "metadata.managedFields"


def _clauses(header: str) -> list[tuple[str, dict[str, str]]]:
    """Return each media type of the header with its parameters."""
    found = []
    for clause in header.split(","):
        media, *parameters = (part.strip() for part in clause.split(";"))
        names_and_values = (part.partition("=") for part in parameters)
        found.append((media, {name.strip(): value.strip() for name, _equals, value in names_and_values}))
    return found


def omits_managed_fields(header: str) -> bool:
    """Return whether a server with the feature gate ManagedFieldsOptOut omits the field from its answer.

    A clause by which another field would be omitted is not acceptable; the next one decides. Raises Failure if none is
    left.
    """
    for media, parameters in _clauses(header or "*/*"):
        omitted = parameters.get("drop")
        if media in _JSON and omitted in (None, _OMITTED):
            return omitted is not None
    raise Failure(406, "NotAcceptable", "only the following media types are accepted: application/json")


def without_managed_fields(body: Object) -> Object:
    """Return an object, or a list of objects, without their managed fields."""
    if "items" in body:
        return {**body, "items": [without_managed_fields(item) for item in body["items"]]}
    metadata = {key: value for key, value in (body.get("metadata") or {}).items() if key != "managedFields"}
    return {**body, "metadata": metadata}
