# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Reading from an API server as plain JSON: lists in pages, single objects, watches.

Model classes of the kubernetes package are not used: they cost several times the time and memory of plain JSON.
"""

from __future__ import annotations

import json
import socket
import time
import urllib.parse
from typing import Any, Callable, Dict, Iterator, List, Mapping, NamedTuple, Optional, Tuple, TypeVar

from ..errors import ApiError
from .connection import ApiConnection, make_client
from .parse_service import SERVICE_PROXY_NAME_LABEL
from .parse_slice import HEADLESS_LABEL
from .snapshot import with_kind

PAGE_SIZE = 500
_LIST_ATTEMPTS = 3
_BUSY_ATTEMPTS = 3
_BUSY = (429, 503)
_LONGEST_PAUSE_SECONDS = 5.0
_WATCH_GRACE_SECONDS = 15.0

Item = TypeVar("Item")


class ApiStatusError(ApiError):
    """The API server answered with a failure; ``code`` is the HTTP status."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class Expired(ApiStatusError):
    """What was asked for is too old (410): the list must be started again."""


class ResourceType(NamedTuple):
    """A collection of objects: its path on the server, the plural name, and what to ask for of it by default."""

    path: str
    name: str
    kind: str
    label_selector: str = ""
    field_selector: str = ""


SERVICES = ResourceType(
    "/api/v1/services", "services", "Service", f"!{SERVICE_PROXY_NAME_LABEL}", "spec.clusterIP!=None"
)
ENDPOINT_SLICES = ResourceType(
    "/apis/discovery.k8s.io/v1/endpointslices", "endpointslices", "EndpointSlice", f"!{HEADLESS_LABEL}"
)
NODES = ResourceType("/api/v1/nodes", "nodes", "Node")
SERVICE_CIDRS = ResourceType("/apis/networking.k8s.io/v1/servicecidrs", "servicecidrs", "ServiceCIDR")


class ListResult(NamedTuple):
    """Raw objects, kind and apiVersion filled in, and the resourceVersion from which a watch goes on."""

    items: List[Dict[str, Any]]
    resource_version: str


class WatchEvent(NamedTuple):
    """``type`` is ADDED, MODIFIED, DELETED or BOOKMARK; ``object`` is raw (a bookmark's holds metadata only)."""

    type: str
    object: Dict[str, Any]

    @property
    def resource_version(self) -> str:
        """From where a watch goes on after this event."""
        return str((self.object.get("metadata") or {}).get("resourceVersion") or "")


class ApiClient:
    """A connection to one API server. ``timeout``: seconds for connecting, and for every answer to a request.

    Not to be used by several threads at once. Raises ConfigurationError or ApiError from the start.
    """

    def __init__(
        self, connection: ApiConnection, timeout: float = 30.0, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        client = make_client(connection)
        self._configuration = client.configuration
        self._pool = client.rest_client.pool_manager
        # A watch is silent for long; only the system can tell that the server at its other end has gone.
        self._pool.connection_pool_kw.setdefault("socket_options", _socket_options())
        self._timeout = timeout
        self._sleep = sleep
        self.host = str(self._configuration.host).rstrip("/")

    def close(self) -> None:
        """Close all connections."""
        self._pool.clear()

    def list(
        self,
        resource: ResourceType,
        field_selector: str = "",
        resource_version: str = "",
        reduce: Callable[[Dict[str, Any]], Dict[str, Any]] = lambda item: item,
    ) -> ListResult:
        """All objects of a collection that its selectors leave, in pages that belong to one resourceVersion.

        ``field_selector`` takes the place of the resource's own. ``resource_version`` ``"0"`` takes what the server
        has in its cache, another one what is not older than that. ``reduce`` is applied to each object when its page
        has come, so that no more than a page is held in full. Pages that expire underway make the list start again.
        Raises ApiError.
        """
        for attempt in range(1, _LIST_ATTEMPTS + 1):
            try:
                return self._list_once(resource, field_selector, resource_version, reduce)
            except Expired:
                if attempt == _LIST_ATTEMPTS:
                    raise
        raise ApiError(f"API server {self.host}: cannot list {resource.name}")

    def _list_once(
        self,
        resource: ResourceType,
        field_selector: str,
        resource_version: str,
        reduce: Callable[[Dict[str, Any]], Dict[str, Any]],
    ) -> ListResult:
        query = _selectors(resource, field_selector)
        query["limit"] = str(PAGE_SIZE)
        if resource_version:
            query["resourceVersion"] = resource_version
        items: List[Dict[str, Any]] = []
        while True:
            page = self._get_json(resource.path, query, f"list {resource.name}")
            metadata = page.get("metadata")
            found = page.get("items")
            if not isinstance(metadata, dict) or not (found is None or isinstance(found, list)):
                raise ApiError(f"API server {self.host}: the answer to list {resource.name} is not a list")
            items.extend(map(reduce, with_kind(found or [], f"{resource.kind}List", page.get("apiVersion"))))
            token = metadata.get("continue")
            if not token:
                return ListResult(items, str(metadata.get("resourceVersion") or ""))
            # A page after the first one carries the resourceVersion in its token and must not name one.
            query.pop("resourceVersion", None)
            query["continue"] = str(token)

    def get(self, resource: ResourceType, name: str, namespace: str = "") -> Dict[str, Any]:
        """One object, raw. Raises ApiStatusError with code 404 if there is none, ApiError otherwise."""
        path = resource.path
        if namespace:
            base, _slash, plural = path.rpartition("/")
            path = f"{base}/namespaces/{urllib.parse.quote(namespace, safe='')}/{plural}"
        return self._get_json(f"{path}/{urllib.parse.quote(name, safe='')}", {}, f"get {resource.name} {name}")

    def watch(
        self,
        resource: ResourceType,
        resource_version: str,
        field_selector: str = "",
        timeout_seconds: int = 300,
        read_timeout: Optional[float] = None,
    ) -> Iterator[WatchEvent]:
        """Events after ``resource_version``, bookmarks included, until the server ends the watch.

        The server ends it after ``timeout_seconds`` or earlier; that is no error. ``read_timeout``: seconds without any
        data after which the connection counts as dead. Raises Expired when the version is too old (list again),
        ApiError when the connection breaks.
        """
        query = _selectors(resource, field_selector)
        query.update(
            watch="true",
            allowWatchBookmarks="true",
            resourceVersion=resource_version,
            timeoutSeconds=str(timeout_seconds),
        )
        purpose = f"watch {resource.name}"
        silence = timeout_seconds + _WATCH_GRACE_SECONDS if read_timeout is None else read_timeout
        response = self._request("GET", resource.path, query, purpose, silence)
        try:
            self._raise_for_status(response, purpose)
            for line in self._lines(response, purpose):
                yield self._event(line, resource, purpose)
        finally:
            # The rest of the stream is of no use: the connection cannot serve another request.
            response.close()

    def post(self, path: str, body: Mapping[str, Any], purpose: str) -> Dict[str, Any]:
        """Create an object at ``path`` and return it as the server stored it. Raises ApiError.

        ``purpose`` is what errors say was tried.
        """
        return self.send("POST", path, body, purpose)

    def send(
        self,
        method: str,
        path: str,
        body: Optional[Mapping[str, Any]],
        purpose: str,
        content_type: str = "application/json",
    ) -> Dict[str, Any]:
        """One request with or without an object, and the answer. Raises ApiError, with a code if the server answers."""
        text = None if body is None else json.dumps(body).encode("utf-8")
        response = self._request(method, path, {}, purpose, self._timeout, text, content_type)
        return self._json_of(response, purpose)

    def _event(self, line: bytes, resource: ResourceType, purpose: str) -> WatchEvent:
        try:
            event = json.loads(line)
            kind, item = event["type"], event["object"]
        except (ValueError, KeyError, TypeError) as error:
            raise ApiError(f"API server {self.host}: {purpose}: an event is not valid: {error}") from error
        if not isinstance(item, dict):
            raise ApiError(f"API server {self.host}: {purpose}: an event holds no object")
        if kind == "ERROR":
            raise self._failure(int(item.get("code") or 500), item, purpose)
        with_kind([item], f"{resource.kind}List", item.get("apiVersion"))
        return WatchEvent(str(kind), item)

    def _lines(self, response: Any, purpose: str) -> Iterator[bytes]:
        rest = b""
        for chunk in self._chunks(response, purpose):
            *lines, rest = (rest + chunk).split(b"\n")
            yield from (line for line in lines if line.strip())
        if rest.strip():
            raise ApiError(f"API server {self.host}: {purpose}: the connection broke in the middle of an event")

    def _chunks(self, response: Any, purpose: str) -> Iterator[bytes]:
        from urllib3.exceptions import HTTPError

        try:
            yield from response.stream(65536, decode_content=True)
        except (HTTPError, OSError) as error:
            raise ApiError(f"API server {self.host}: {purpose}: {_reason(error)}") from error

    def _get_json(self, path: str, query: Mapping[str, str], purpose: str) -> Dict[str, Any]:
        for attempt in range(1, _BUSY_ATTEMPTS + 1):
            response = self._request("GET", path, query, purpose, self._timeout)
            if response.status not in _BUSY or attempt == _BUSY_ATTEMPTS:
                break
            pause = str(response.headers.get("Retry-After") or "1")
            self._drain(response)
            self._sleep(min(float(pause) if pause.isdecimal() else 1.0, _LONGEST_PAUSE_SECONDS))
        return self._json_of(response, purpose)

    def _json_of(self, response: Any, purpose: str) -> Dict[str, Any]:
        self._raise_for_status(response, purpose)
        try:
            value = json.loads(self._body(response, purpose))
        except ValueError as error:
            raise ApiError(f"API server {self.host}: {purpose}: the answer is not JSON: {error}") from error
        if not isinstance(value, dict):
            raise ApiError(f"API server {self.host}: {purpose}: the answer is not an object")
        return value

    def _body(self, response: Any, purpose: str) -> bytes:
        body = b"".join(self._chunks(response, purpose))
        response.release_conn()
        return body

    def _drain(self, response: Any) -> None:
        self._body(response, "read")

    def _raise_for_status(self, response: Any, purpose: str) -> None:
        if 200 <= response.status < 300:
            return
        text = self._body(response, purpose)
        try:
            status = json.loads(text)
        except ValueError:
            status = {"message": text[:200].decode("utf-8", "replace")}
        raise self._failure(response.status, status if isinstance(status, dict) else {}, purpose)

    def _failure(self, code: int, status: Mapping[str, Any], purpose: str) -> ApiStatusError:
        message = str(status.get("message") or status.get("reason") or "no reason given")
        where = f"API server {self.host}: {purpose}"
        if code == 401:
            return ApiStatusError(f"{where}: the credentials are not accepted (401 {message})", code)
        if code == 403:
            return ApiStatusError(f"{where}: not allowed (403): {message}", code)
        kind = Expired if code == 410 else ApiStatusError
        return kind(f"{where}: the server answered {code}: {message}", code)

    def _request(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        purpose: str,
        read_timeout: float,
        body: Optional[bytes] = None,
        content_type: str = "application/json",
    ) -> Any:
        from urllib3 import Timeout
        from urllib3.exceptions import HTTPError

        url = self.host + path
        if query:
            url += "?" + urllib.parse.urlencode(query)
        headers = {"Accept": "application/json", "Accept-Encoding": "gzip", "User-Agent": "kubenode-proxy"}
        if body is not None:
            headers["Content-Type"] = content_type
        headers.update(self._credentials())
        timeout = Timeout(connect=min(self._timeout, read_timeout), read=read_timeout)
        try:
            return self._pool.request(
                method,
                url,
                body=body,
                headers=headers,
                timeout=timeout,
                retries=False,
                preload_content=False,
                redirect=False,
            )
        except (HTTPError, OSError, ValueError) as error:
            raise ApiError(f"API server {self.host}: {purpose}: {_reason(error)}") from error

    def _credentials(self) -> Iterator[Tuple[str, str]]:
        # Asked for anew each time: the kubernetes package renews tokens of files and plugins in this call.
        for setting in self._configuration.auth_settings().values():
            if setting and setting.get("in") == "header" and setting.get("value"):
                yield setting["key"], setting["value"]


def _socket_options() -> List[Tuple[int, int, int]]:
    """Notice within half a minute that a silent connection is dead; send small requests at once."""
    return [
        (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    ]


def _selectors(resource: ResourceType, field_selector: str) -> Dict[str, str]:
    query: Dict[str, str] = {}
    if resource.label_selector:
        query["labelSelector"] = resource.label_selector
    if field_selector or resource.field_selector:
        query["fieldSelector"] = field_selector or resource.field_selector
    return query


def _reason(error: BaseException) -> str:
    """What went wrong with a connection, in a few words."""
    from urllib3 import exceptions

    text = str(getattr(error, "reason", None) or error)
    # A message of urllib3 begins with the object it comes from.
    text = text.rpartition(">: ")[2] or text
    if isinstance(error, exceptions.ConnectTimeoutError) and not isinstance(error, exceptions.NewConnectionError):
        return "no connection within the time allowed"
    if isinstance(error, exceptions.ReadTimeoutError):
        return "no answer within the time allowed"
    if isinstance(error, exceptions.SSLError):
        return f"TLS: {text}"
    if isinstance(error, exceptions.NewConnectionError):
        return f"cannot be reached: {text}"
    if isinstance(error, exceptions.ProtocolError):
        return f"the connection broke: {text}"
    return text


def unless_absent(read: Callable[[], Item]) -> Optional[Item]:
    """What ``read`` returns, or None if the API server answers that there is no such object. Raises ApiError."""
    try:
        return read()
    except ApiStatusError as error:
        if error.code == 404:
            return None
        raise


def list_objects(connection: ApiConnection, timeout: float = 30.0) -> List[Dict[str, Any]]:
    """All Services, EndpointSlices, Nodes and ServiceCIDRs that a service proxy reads, raw.

    ``timeout``: seconds for each answer. A cluster too old to have ServiceCIDRs has none. Raises ApiError,
    ConfigurationError.
    """
    client = ApiClient(connection, timeout)
    try:
        items = [*client.list(NODES).items, *client.list(SERVICES).items, *client.list(ENDPOINT_SLICES).items]
        try:
            items.extend(client.list(SERVICE_CIDRS).items)
        except ApiStatusError as error:
            if error.code != 404:
                raise
        return items
    finally:
        client.close()
