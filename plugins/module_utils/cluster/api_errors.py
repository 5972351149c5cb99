# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Failures of requests to an API server, and predicates on them."""

from __future__ import annotations

from typing import Callable, Optional, TypeVar

from ..errors import ApiError, ProxyError

_NOT_FOUND, _INTERNAL_ERROR = 404, 500

Item = TypeVar("Item")


class ApiStatusError(ApiError):
    """The API server answered with a failure; ``code`` is the HTTP status."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class Expired(ApiStatusError):
    """The requested resourceVersion is too old (410): the list must be restarted."""


class WatchFailed(ApiStatusError):
    """The server ended a watch with an event of type ERROR: the collection must be listed again."""


def concerns_server(error: ProxyError) -> bool:
    """Return whether another API server of the same cluster may succeed.

    True for a connection that fails, an answer that is not an API server's, and a status of 500 or above.
    """
    code = error.code if isinstance(error, ApiStatusError) else _INTERNAL_ERROR
    return isinstance(error, ApiError) and code >= _INTERNAL_ERROR


def unless_absent(read: Callable[[], Item]) -> Optional[Item]:
    """Return the result of ``read``, or None if the API server has no such object. Raises ApiError."""
    try:
        return read()
    except ApiStatusError as error:
        if error.code == _NOT_FOUND:
            return None
        raise
