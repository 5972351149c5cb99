# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Failures that the test API server answers with, as objects of kind Status."""

from __future__ import annotations

from typing import Any

from .store import Object


class Failure(Exception):
    """An answer of kind Status: ``code`` is its HTTP status, ``body`` the object.

    ``more``: further fields of the object (``details``, ``metadata``).
    """

    def __init__(self, code: int, reason: str, message: str, **more: Any) -> None:
        super().__init__(message)
        self.code = code
        self.body: Object = {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": more.pop("metadata", {}),
            "status": "Failure",
            "message": message,
            "reason": reason,
            **more,
            "code": code,
        }


def not_found(plural: str, name: str) -> Failure:
    """Return the failure for an object that does not exist. ``plural``: the kind's name in paths."""
    return Failure(404, "NotFound", f'{plural} "{name}" not found', details={"name": name, "kind": plural})


def no_resource() -> Failure:
    """Return the failure for a path of a kind that the server does not have."""
    return Failure(404, "NotFound", "the server could not find the requested resource", details={})
