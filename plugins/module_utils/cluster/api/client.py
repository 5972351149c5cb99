# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Client of an API server that returns plain JSON: lists in pages, single objects, watches.

The model classes of the kubernetes package are not used: they need several times the time and memory of plain JSON.
"""

from __future__ import annotations

import json
import time
import urllib.parse
from typing import Any, Callable, Iterator, Mapping, NamedTuple, Optional, Sequence

from ...base.errors import ApiError, ProxyError, errors_as
from ..files.snapshot import with_kind
from .access.transport import Dial, Patience, Response, Transport, TransportError
from .answers import (
    FAILURE_BYTES,
    LINE_BYTES,
    PAGE_BYTES,
    InvalidAnswer,
    WatchEvent,
    beginning,
    document,
    event,
    lines,
    status_code,
    status_of,
    status_reason,
    status_text,
    version_of,
    whole,
)
from .connection import ApiConnection, resolve
from .discovery import served_version
from .errors import FORBIDDEN, UNAUTHORIZED, ApiStatusError, Expired, WatchFailed, concerns_server
from .resource_types import ENDPOINT_SLICES, NODES, OPTIONAL, SERVICE_CIDRS, SERVICES, ResourceType

#: Managed fields are up to half of an object and never read. Servers with KEP-5958 leave them out; others ignore the
#: parameter, or take the second clause.
_ACCEPT = "application/json;drop=metadata.managedFields, application/json"
PAGE_SIZE = 500
#: A million objects, far above the cluster sizes that Kubernetes is tested with.
_MOST_PAGES = 2000
#: Limit of pages, apart from the last one, with fewer objects than requested: API servers return full pages.
_MOST_SHORT_PAGES = 50
_LIST_ATTEMPTS = 3
_BUSY_ATTEMPTS = 3
_BUSY = (429, 503)
_LONGEST_PAUSE_SECONDS = 5.0
_WATCH_GRACE_SECONDS = 15.0
#: Timeout of a whole answer, as a multiple of the timeout of its first byte.
_WHOLE_ANSWER_FACTOR = 10.0
_BAD_REQUEST, _GONE, _INTERNAL_ERROR = 400, 410, 500


class ListResult(NamedTuple):
    """Raw objects with kind and apiVersion filled in, or what they were reduced to.

    ``resource_version``: where a watch continues.
    """

    items: list[Any]
    resource_version: str


#: Called with a request's method, the server's host and port, the status of the answer ("<error>" for none) and the
#: seconds until it began (None for a watch).
Observer = Callable[[str, str, str, Optional[float]], None]


class ApiClient:
    """A connection to one API server. ``timeout``: seconds to connect, and for each answer to begin.

    ``unsupported``: paths of collections whose field selector the server does not support; clients may share the set,
    so that each server is asked only once. ``expect`` is called before each request with an upper limit of its duration
    in seconds. ``observe`` is called after each request. ``failed`` is called with the reason when the server does not
    work, and returns whether another one should be used from now on. ``connect_timeout``: seconds to connect, if they
    differ. ``dial`` and ``clock`` replace the network and the clock.

    Must not be used by several threads concurrently, except for :meth:`interrupt`. The constructor raises
    ConfigurationError or ApiError if the connection's options cannot be used.
    """

    def __init__(
        self,
        connection: ApiConnection,
        timeout: float = 30.0,
        sleep: Callable[[float], None] = time.sleep,
        *,
        unsupported: Optional[set[str]] = None,
        expect: Callable[[float], None] = lambda seconds: None,
        observe: Observer = lambda method, host, code, seconds: None,
        failed: Callable[[str], bool] = lambda reason: False,
        connect_timeout: Optional[float] = None,
        dial: Optional[Dial] = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._access = resolve(connection)
        self._transport = Transport(self._access, dial, clock)
        self._clock = clock
        self._timeout = timeout
        self._sleep = sleep
        self._unsupported = set() if unsupported is None else unsupported
        self._expect = expect
        self._observe = observe
        self._failed = failed
        self._connect_timeout = timeout if connect_timeout is None else connect_timeout
        self.host = self._access.server
        self.warnings = self._access.warnings

    def close(self) -> None:
        """Close the connection."""
        self._transport.close()

    def interrupt(self) -> None:
        """Abort the current request; may be called from any thread."""
        self._transport.interrupt()

    def report(self, error: ProxyError) -> bool:
        """Report an error of a request; return whether another API server should be used from now on."""
        return concerns_server(error) and self._failed(str(error))

    def ready(self) -> int:
        """Return the status with which the server answers ``/readyz``. Raises ApiError if it is 500 or above.

        401 is the answer to credentials that are not accepted, 403 to clients that may not read it.
        """
        answer = self._request("GET", "/readyz", {}, "check", patience=self._patience)
        if answer.status >= _INTERNAL_ERROR:
            raise self._failure(
                answer.status, status_of(beginning(self._pieces(answer, "check"), FAILURE_BYTES)), "check"
            )
        return answer.status

    def list(
        self,
        resource: ResourceType,
        field_selector: str = "",
        resource_version: str = "",
        reduce: Callable[[Any], Any] = lambda item: item,
    ) -> ListResult:
        """Return all objects of a collection that its selectors match, read in pages of one resourceVersion.

        ``field_selector`` replaces the resource's own. With ``resource_version`` ``"0"`` the server answers from its
        cache; with another version it answers with a state that is not older. ``reduce`` is applied to each object as
        its page arrives, so that at most one page is held unreduced; objects for which it returns None are dropped. If
        the pages expire during the list, it is restarted. Raises ApiError.
        """
        for attempt in range(1, _LIST_ATTEMPTS + 1):
            try:
                return self._list_once(resource, field_selector, resource_version, reduce)
            except Expired:
                if attempt == _LIST_ATTEMPTS:
                    raise
            except ApiStatusError as error:
                if not self._drops_selector(resource, field_selector, error):
                    raise
        return self._list_once(resource, field_selector, resource_version, reduce)

    def _list_once(
        self, resource: ResourceType, field_selector: str, resource_version: str, reduce: Callable[[Any], Any]
    ) -> ListResult:
        query = self._selectors(resource, field_selector)
        query["limit"] = str(PAGE_SIZE)
        if resource_version:
            query["resourceVersion"] = resource_version
        purpose = f"list {resource.name}"
        where = f"API server {self.host}: {purpose}"
        items: list[Any] = []
        short = 0
        for _number in range(_MOST_PAGES):
            page = self._get_json(resource.path, query, purpose)
            metadata, found, version = page.get("metadata"), page.get("items"), version_of(page)
            if not isinstance(metadata, dict) or not (found is None or isinstance(found, list)):
                raise InvalidAnswer(f"{where}: the answer is not a list")
            if page.get("kind") != f"{resource.kind}List":
                raise InvalidAnswer(f"{where}: the answer is not a {resource.kind}List")
            if not version:
                raise InvalidAnswer(f"{where}: the answer has no valid resourceVersion")
            complete = with_kind(found or [], f"{resource.kind}List", page.get("apiVersion"))
            items += [item for item in map(reduce, complete) if item is not None]
            token = metadata.get("continue")
            if not token:
                return ListResult(items, version)
            short += len(complete) < PAGE_SIZE
            if short > _MOST_SHORT_PAGES:
                raise ApiError(f"{where}: more than {_MOST_SHORT_PAGES} pages are incomplete without being the last")
            # After the first page the continue token contains the resourceVersion; sending both is an error.
            query.pop("resourceVersion", None)
            query["continue"] = str(token)
        raise ApiError(f"{where}: the list has more than {_MOST_PAGES} pages")

    def _drops_selector(self, resource: ResourceType, field_selector: str, error: ApiStatusError) -> bool:
        """Return whether to retry without the resource's field selector, because this server does not support it.

        Services can be selected by ``spec.clusterIP`` since Kubernetes 1.31; older servers answer 400.
        """
        own = resource.field_selector and not field_selector and resource.path not in self._unsupported
        if own and error.code == _BAD_REQUEST and "field label not supported" in str(error):
            self._unsupported.add(resource.path)
            return True
        return False

    def _selectors(self, resource: ResourceType, field_selector: str) -> dict[str, str]:
        query: dict[str, str] = {}
        if resource.label_selector:
            query["labelSelector"] = resource.label_selector
        own = "" if resource.path in self._unsupported else resource.field_selector
        if field_selector or own:
            query["fieldSelector"] = field_selector or own
        return query

    def get(self, resource: ResourceType, name: str, namespace: str = "") -> dict[str, Any]:
        """Return one raw object. Raises ApiStatusError with code 404 if it does not exist, ApiError otherwise."""
        path = (resource.in_namespace(namespace) if namespace else resource).path
        return self._get_json(f"{path}/{urllib.parse.quote(name, safe='')}", {}, f"get {resource.name} {name}")

    def watch(
        self,
        resource: ResourceType,
        resource_version: str,
        field_selector: str = "",
        timeout_seconds: int = 300,
        read_timeout: Optional[float] = None,
    ) -> Iterator[WatchEvent]:
        """Open a watch and return its events after ``resource_version``, including bookmarks, until the server ends it.

        The server ends it after ``timeout_seconds`` or earlier; that is not an error. ``read_timeout``: seconds without
        data after which the connection is considered dead. Raises Expired if the version is too old (list again),
        WatchFailed or InvalidAnswer if the stream is invalid, ApiError if the connection breaks; the iterator raises
        the same.
        """
        query = self._selectors(resource, field_selector)
        query.update(
            watch="true",
            allowWatchBookmarks="true",
            resourceVersion=resource_version,
            timeoutSeconds=str(timeout_seconds),
        )
        purpose = f"watch {resource.name}"
        total = timeout_seconds + _WATCH_GRACE_SECONDS
        silence = total if read_timeout is None else read_timeout
        answer = self._request(
            "GET", resource.path, query, purpose, patience=Patience(self._connect_timeout, silence, total)
        )
        self._raise_for_status(answer, purpose)
        return self._events(answer, resource.kind, purpose)

    def _events(self, answer: Response, kind: str, purpose: str) -> Iterator[WatchEvent]:
        where = f"API server {self.host}: {purpose}"
        try:
            for line in lines(self._pieces(answer, purpose), LINE_BYTES, where):
                found = event(line, kind, where)
                if found.type == "ERROR":
                    failure = self._failure(status_code(found.object), found.object, purpose)
                    raise failure if isinstance(failure, Expired) else WatchFailed(str(failure), failure.code)
                yield found
        finally:
            # The connection cannot be reused before the end of the stream, so close it.
            answer.close()

    def post(self, path: str, body: Mapping[str, Any], purpose: str) -> dict[str, Any]:
        """Create an object at ``path`` and return it as the server stored it. Raises ApiError.

        ``purpose`` describes the request in errors.
        """
        return self.send("POST", path, body, purpose)

    def send(
        self,
        method: str,
        path: str,
        body: Optional[Mapping[str, Any]],
        purpose: str,
        content_type: str = "application/json",
    ) -> dict[str, Any]:
        """Send a request, with or without an object, and return the answer. Raises ApiError."""
        text = None if body is None else json.dumps(body).encode("utf-8")
        answer = self._request(method, path, {}, purpose, patience=self._patience, body=text, content_type=content_type)
        return self._json_of(answer, purpose)

    @property
    def _patience(self) -> Patience:
        return Patience(self._connect_timeout, self._timeout, self._timeout * _WHOLE_ANSWER_FACTOR)

    def _pieces(self, answer: Response, purpose: str) -> Iterator[bytes]:
        with errors_as(ApiError, f"API server {self.host}: {purpose}", TransportError):
            yield from answer.pieces()

    def _get_json(self, path: str, query: Mapping[str, str], purpose: str) -> dict[str, Any]:
        for attempt in range(1, _BUSY_ATTEMPTS + 1):
            answer = self._request("GET", path, query, purpose, patience=self._patience)
            if answer.status not in _BUSY or attempt == _BUSY_ATTEMPTS:
                break
            pause = answer.header("Retry-After") or "1"
            beginning(self._pieces(answer, purpose), FAILURE_BYTES)
            self._sleep(min(float(pause) if pause.isdecimal() else 1.0, _LONGEST_PAUSE_SECONDS))
        return self._json_of(answer, purpose)

    def _json_of(self, answer: Response, purpose: str) -> dict[str, Any]:
        self._raise_for_status(answer, purpose)
        where = f"API server {self.host}: {purpose}"
        return document(whole(self._pieces(answer, purpose), PAGE_BYTES, f"{where}: the answer"), where)

    def _raise_for_status(self, answer: Response, purpose: str) -> None:
        if 200 <= answer.status < 300:
            return
        if answer.status == UNAUTHORIZED:
            self._access.credentials.rejected()
        raise self._failure(answer.status, status_of(beginning(self._pieces(answer, purpose), FAILURE_BYTES)), purpose)

    def _failure(self, code: int, status: dict[str, Any], purpose: str) -> ApiStatusError:
        message = status_text(status)
        where = f"API server {self.host}: {purpose}"
        if code == UNAUTHORIZED:
            return ApiStatusError(f"{where}: the credentials are not accepted (401 {message})", code)
        if code == FORBIDDEN:
            return ApiStatusError(f"{where}: not allowed (403): {message}", code)
        kind = Expired if code == _GONE else ApiStatusError
        return kind(f"{where}: the server answered {code}: {message}", code, status_reason(status))

    def _request(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        purpose: str,
        *,
        patience: Patience,
        body: Optional[bytes] = None,
        content_type: str = "application/json",
    ) -> Response:
        """Send a request. All requests are sent here."""
        headers = [("Accept", _ACCEPT), ("User-Agent", "kubenode-proxy")]
        if self._access.compress:
            headers.append(("Accept-Encoding", "gzip"))
        if body is not None:
            headers.append(("Content-Type", content_type))
        self._expect(patience.connect + patience.total)
        headers += [*self._access.credentials.headers(), *self._access.headers]
        target = f"{path}?{urllib.parse.urlencode(query)}" if query else path
        started = self._clock()
        code = "<error>"
        try:
            answer = self._transport.request(method, target, headers, body, patience)
            code = str(answer.status)
            return answer
        except TransportError as error:
            raise ApiError(f"API server {self.host}: {purpose}: {error}") from error
        finally:
            # The answer to a watch may begin only with the first event, so its time is not a latency of the server.
            seconds = None if "watch" in query else self._clock() - started
            self._observe(method, urllib.parse.urlsplit(self.host).netloc, code, seconds)


def list_objects(
    connection: ApiConnection, timeout: float = 30.0, others: Sequence[ResourceType] = ()
) -> list[dict[str, Any]]:
    """Return all Services, EndpointSlices, Nodes and ServiceCIDRs that a service proxy reads, as raw objects.

    ``timeout``: seconds for each answer. ``others``: further collections. Clusters that do not know ServiceCIDRs or
    ClusterNetworkPolicies return none. Raises ApiError, ConfigurationError.
    """
    client = ApiClient(connection, timeout)
    try:
        items = [*client.list(NODES).items, *client.list(SERVICES).items, *client.list(ENDPOINT_SLICES).items]
        for resource in (SERVICE_CIDRS, *others):
            try:
                items.extend(client.list(resource).items)
            except ApiStatusError as error:
                if resource not in OPTIONAL:
                    raise
                served = served_version(client, resource, error)
                if served == resource:
                    raise
                items.extend(client.list(served).items if served is not None else ())
        return items
    finally:
        client.close()
