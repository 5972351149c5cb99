# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Conversion of a module's options to a request to the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable, Iterable, Mapping

from ..base.mode_names import AUTO
from ..cluster.api.access.names import with_addresses
from ..cluster.api_addresses import claims_at
from ..cluster.files.static import StaticDirectory, StaticObjects, parse_static
from ..cluster.state import ClusterState
from ..configuration.load import LoadedConfiguration, load, load_file
from ..configuration.model import KubeProxyConfiguration
from ..convergence.request import Request
from .sources import api_server, cluster_objects, has_source

if TYPE_CHECKING:
    from ansible.module_utils.basic import AnsibleModule

#: The file of static Services that the roles write; the option ``static_services`` replaces it.
STATIC_FILE = "ansible.json"
_REMOVING = ("absent", "handed_over")


def proxy_configuration(parameters: Mapping[str, Any]) -> LoadedConfiguration:
    """Return the configuration from the file or the fields in the options, and its warnings.

    A mode in the options replaces that of the configuration before validation, and ``node_configuration`` the
    NodeProxyConfiguration of the file. Where all modes are removed, it does not matter. Raises ConfigurationError.
    """
    mode = parameters["mode"] or ("" if parameters.get("state") not in _REMOVING else AUTO)
    node_source = parameters["node_configuration"] or None
    if parameters["config"] is not None:
        return load_file(parameters["config"], mode, node_source)
    return load(parameters["configuration"] or {}, mode, node_source)


def _static_services(parameters: Mapping[str, Any], configuration: KubeProxyConfiguration) -> StaticObjects:
    """Return the static Services of the node with those in the options; only these if no node is read."""
    given = parameters["static_services"]
    if parameters.get("state") == "rendered":
        return parse_static({STATIC_FILE: given or []})
    replaced = {STATIC_FILE: given} if given is not None else {}
    return StaticDirectory(configuration.node_proxy.static_services.directory, replaced).read()


def engine_request(
    module: AnsibleModule, source: str, configured: Callable[[KubeProxyConfiguration], None] = lambda _loaded: None
) -> tuple[Request, tuple[str, ...]]:
    """Return the request for a module's options, and warnings about the configuration.

    ``source``: ``required``, ``optional`` or ``unused``; without a source the cluster is empty. ``configured`` is
    called with the configuration before the cluster and the static Services are read. Raises ConfigurationError,
    SnapshotError, ApiError.
    """
    parameters: dict[str, Any] = module.params
    configuration, warnings = proxy_configuration(parameters)
    configured(configuration)
    wanted = source == "required" or (source == "optional" and has_source(module))
    cluster = ClusterState()
    objects: Callable[[], Iterable[Any]] = tuple
    if wanted:
        objects = cluster_objects(module, configuration.node_proxy.network_policy.resources)
        cluster = ClusterState.from_objects(objects())
        servers = [*configuration.node_proxy.api_servers.alternatives, *api_server(module)]
        cluster.set_api_servers(claims_at(with_addresses(servers)))
        cluster.set_static(_static_services(parameters, configuration))
    request = Request(
        cluster=cluster,
        configuration=configuration,
        objects=objects,
        node_name=parameters["node_name"] or "",
        mode=parameters["mode"] or "",
        state=parameters["state"] if parameters.get("state") in _REMOVING else "present",
        fallback=parameters["fallback"] or "",
        check=bool(module.check_mode),
        describe=bool(module._diff),
        state_directory=parameters["state_directory"],
        lock_timeout=parameters["lock_timeout"],
        ignore_findings=tuple(parameters["ignore_findings"]),
        node_addresses=tuple(parameters.get("node_addresses") or ()),
        whole_cluster=wanted,
        outside_host=parameters["outside_host"],
        max_unserved_percent=parameters.get("max_unserved_percent", 100.0),
        unattended=parameters.get("unattended", False),
    )
    return request, warnings
