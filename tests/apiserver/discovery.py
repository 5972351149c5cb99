# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The documents in which the test API server lists its groups and resources."""

from __future__ import annotations

from typing import AbstractSet, Optional

from .store import SERVED, Kind, Object


def _versions(absent: AbstractSet[str]) -> dict[str, list[Kind]]:
    """Return the kinds of each version of a named group, without the collections that the server does not have."""
    found: dict[str, list[Kind]] = {}
    for path, kind in SERVED.items():
        if path.startswith("/apis/") and path not in absent:
            found.setdefault(kind.api_version, []).append(kind)
    return found


def discovery(path: str, absent: AbstractSet[str]) -> Optional[Object]:
    """Return the document at a path, None if there is none."""
    versions = _versions(absent)
    if path == "/apis":
        groups = [
            {"name": name.partition("/")[0], "versions": [{"groupVersion": name, "version": name.partition("/")[2]}]}
            for name in versions
        ]
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
    version = path.partition("/apis/")[2]
    if version not in versions:
        return None
    resources = [
        {"name": kind.plural, "singularName": "", "namespaced": kind.namespaced, "kind": kind.kind, "verbs": ["list"]}
        for kind in versions[version]
    ]
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": resources}
