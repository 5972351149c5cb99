# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Failures of requests to an API server, and predicates on them."""

from __future__ import annotations

from typing import Callable, Optional, TypeVar

from ...base.errors import ApiError, ProxyError

UNAUTHORIZED, FORBIDDEN, NOT_FOUND = 401, 403, 404
_INTERNAL_ERROR = 500

Item = TypeVar("Item")


class ApiStatusError(ApiError):
    """The API server answered with a failure; ``code`` is the HTTP status.

    ``reason``: that of the answer's Status object; empty if the answer has none, as those of load balancers.
    """

    def __init__(self, message: str, code: int, reason: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason

    @property
    def says_not_found(self) -> bool:
        """Whether an API server, and nothing in front of it, says that it does not have what was requested."""
        return self.code == NOT_FOUND and self.reason == "NotFound"

    @property
    def refuses_version(self) -> bool:
        """Whether the server cannot read the request's resourceVersion, which an API server of another kind sent.

        The answer is 400; that to a watch was 500 up to Kubernetes 1.36 at least.
        """
        return self.code in (400, _INTERNAL_ERROR) and "resourceVersion: Invalid value" in str(self)


class Expired(ApiStatusError):
    """The requested resourceVersion is too old (410): the list must be restarted."""


class NotServed(ApiStatusError):
    """The API server has a collection, but in no version that is read here: its objects exist and are not known."""


class WatchFailed(ApiStatusError):
    """The server ended a watch with an event of type ERROR: the collection must be listed again."""


def concerns_server(error: ProxyError) -> bool:
    """Return whether another API server of the same cluster may succeed.

    True for a connection that fails, an answer that is not an API server's, and a status of 500 or above.
    """
    code = error.code if isinstance(error, ApiStatusError) else _INTERNAL_ERROR
    return isinstance(error, ApiError) and code >= _INTERNAL_ERROR


def unless_absent(read: Callable[[], Item]) -> Optional[Item]:
    """Return the result of ``read``, or None if the API server has no such object. Raises ApiError.

    An answer of 404 that is not an API server's is an error: the object may exist.
    """
    try:
        return read()
    except ApiStatusError as error:
        if error.says_not_found:
            return None
        raise
