# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Where an API server is and how to authenticate to it: kubeconfig, credentials and TLS by the kubernetes package."""

from __future__ import annotations

import os
from typing import Any, NamedTuple, Optional

from ..errors import ApiError, ConfigurationError

_IN_CLUSTER_VARIABLE = "KUBERNETES_SERVICE_HOST"


class ApiConnection(NamedTuple):
    """Options of a connection; None stands for what the kubeconfig or the default says.

    ``kubeconfig``: path of the file. ``context``: name in it. ``host``: URL of the server. ``api_key``: bearer token.
    ``ca_cert``, ``client_cert``, ``client_key``: paths of PEM files. ``validate_certs``: check the server's
    certificate. With neither ``kubeconfig``, ``context`` nor ``host``, a pod's own credentials are used, or else the
    user's kubeconfig.
    """

    kubeconfig: Optional[str] = None
    context: Optional[str] = None
    host: Optional[str] = None
    api_key: Optional[str] = None
    ca_cert: Optional[str] = None
    client_cert: Optional[str] = None
    client_key: Optional[str] = None
    validate_certs: Optional[bool] = None


def make_client(connection: ApiConnection) -> Any:
    """A ``kubernetes.client.ApiClient`` for the connection; nothing is sent yet.

    Raises ConfigurationError for a kubeconfig or a file that cannot be used, ApiError without the kubernetes package.
    """
    try:
        from kubernetes import client
        from kubernetes import config as kubernetes_config
    except ImportError as error:
        raise ApiError(f"reading from an API server needs the Python package kubernetes: {error}") from error
    configuration = client.Configuration()
    # Each attempt is ours to judge and to report: urllib3 would repeat them in silence.
    configuration.retries = False
    try:
        if connection.kubeconfig or connection.context or not connection.host:
            _load_credentials(connection, configuration, kubernetes_config)
        _apply(connection, configuration)
        return client.ApiClient(configuration)
    except kubernetes_config.ConfigException as error:
        raise ConfigurationError(f"{_source(connection)}: {error}") from error
    except OSError as error:
        # An unreadable certificate or key: SSLError is an OSError too, without a file name of its own.
        name = error.filename or connection.client_cert or connection.ca_cert or _source(connection)
        raise ConfigurationError(f"{name}: {error.strerror or error}") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        # The kubernetes package does not check the shape of a kubeconfig before it walks through it.
        raise ConfigurationError(f"{_source(connection)}: is not a valid kubeconfig: {error}") from error


def _source(connection: ApiConnection) -> str:
    return connection.kubeconfig or "kubeconfig"


def _load_credentials(connection: ApiConnection, configuration: Any, kubernetes_config: Any) -> None:
    if not connection.kubeconfig and not connection.context and os.environ.get(_IN_CLUSTER_VARIABLE):
        kubernetes_config.load_incluster_config(client_configuration=configuration)
        return
    for path in (connection.kubeconfig or "").split(os.pathsep):
        if path and not os.access(os.path.expanduser(path), os.R_OK):
            state = "cannot be read" if os.path.exists(os.path.expanduser(path)) else "does not exist"
            raise ConfigurationError(f"{path}: the kubeconfig {state}")
    try:
        kubernetes_config.load_kube_config(
            config_file=connection.kubeconfig,
            context=connection.context,
            client_configuration=configuration,
            persist_config=False,
        )
    except Exception as error:
        if type(error).__module__.split(".", maxsplit=1)[0] == "yaml":
            raise ConfigurationError(f"{_source(connection)}: is not valid YAML: {error}") from error
        raise


def _apply(connection: ApiConnection, configuration: Any) -> None:
    if connection.host:
        configuration.host = connection.host.rstrip("/")
    if connection.api_key:
        configuration.api_key = {"authorization": f"Bearer {connection.api_key}"}
        configuration.api_key_prefix = {}
        configuration.refresh_api_key_hook = None
    for path in (connection.ca_cert, connection.client_cert, connection.client_key):
        if path and not os.access(path, os.R_OK):
            raise ConfigurationError(f"{path}: the file cannot be read")
    configuration.ssl_ca_cert = connection.ca_cert or configuration.ssl_ca_cert
    configuration.cert_file = connection.client_cert or configuration.cert_file
    configuration.key_file = connection.client_key or configuration.key_file
    if connection.validate_certs is not None:
        configuration.verify_ssl = connection.validate_certs
