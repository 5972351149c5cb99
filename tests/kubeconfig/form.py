# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""One kubeconfig that is tried, and the ways to write it.

In texts, ``@PORT@``, ``@DIR@``, ``@CA@`` and the like mean what a run has; see :mod:`.laboratory`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Optional

HTTP, TLS = "http://127.0.0.1:@PORT@", "https://127.0.0.1:@PORT@"


@dataclass(frozen=True)
class Form:
    """One kubeconfig. ``files``: texts by path; one that ends in a slash is a directory, and one that begins with
    ``->`` a symbolic link. ``listed``: the value of KUBECONFIG, with ``explicit`` the only file, given as option.
    """

    name: str
    files: dict[str, str]
    listed: Optional[str] = "@DIR@/config"
    explicit: bool = False
    context: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    unreadable: tuple[str, ...] = ()
    folder: str = ""


def document(user: Any = None, cluster: Any = None, **others: Any) -> dict[str, Any]:
    """Return a kubeconfig of one context."""
    secured = {"server": TLS, "certificate-authority-data": "@CA@"}
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
        "clusters": [{"name": "k", "cluster": secured if cluster is None else cluster}],
        "users": [{"name": "u", "user": {"token": "t"} if user is None else user}],
        **others,
    }


def dashed(fields: dict[str, Any]) -> dict[str, Any]:
    """Return fields by the names of a kubeconfig, which have dashes."""
    return {key.replace("_", "-"): value for key, value in fields.items()}


def one(
    name: str, user: Any = None, cluster: Any = None, files: Optional[dict[str, str]] = None, /, **others: Any
) -> Form:
    """Return a form of one file."""
    environment = others.pop("environment", {})
    return Form(
        name, {"config": json.dumps(document(user, cluster, **others)), **(files or {})}, environment=environment
    )


def text(name: str, content: str) -> Form:
    """Return a form of one file with this text."""
    return Form(name, {"config": content})
