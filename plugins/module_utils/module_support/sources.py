# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The cluster state from the source that a module's options name."""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING, Any, Callable, Iterable, Sequence

from ..base.errors import ConfigurationError
from ..cluster.api.resource_types import ResourceType
from ..cluster.files.snapshot import snapshot_objects
from .arguments import api_parameters, has_api_source

if TYPE_CHECKING:
    from ansible.module_utils.basic import AnsibleModule

_NO_SERVER = "kubeconfig, context or host, or K8S_AUTH_KUBECONFIG or KUBECONFIG in the environment"
_DEFAULT_KUBECONFIG = os.path.join("~", ".kube", "config")


def read_cluster_objects(module: AnsibleModule, others: Sequence[ResourceType] = ()) -> list[Any]:
    """Read all objects that a service proxy needs from the API server that the options or the environment name.

    ``others``: further collections. Raises ConfigurationError if neither names one, ApiError if it cannot be read.
    """
    chosen = api_parameters(module.params, os.environ)
    has_default = os.environ.get("KUBERNETES_SERVICE_HOST") or os.path.exists(os.path.expanduser(_DEFAULT_KUBECONFIG))
    if not has_api_source(chosen) and not has_default:
        raise ConfigurationError(
            f"no source of the cluster state: there is no {_DEFAULT_KUBECONFIG}; set KUBECONFIG in the environment, or "
            "give the option kubeconfig, context or host (with the role: service_proxy_kubeconfig, "
            "service_proxy_context or service_proxy_api_host), or a file (service_proxy_snapshot)"
        )
    if chosen["api_key"]:
        # Ansible hides a token in the options automatically, but not one from the environment.
        module.no_log_values.add(chosen["api_key"])
    # Imported late: most hosts read a file instead.
    from ..cluster.api.client import list_objects
    from ..cluster.api.connection import ApiConnection

    return list_objects(ApiConnection(**chosen), module.params["api_timeout"], others)


def api_server(module: AnsibleModule) -> list[tuple[str, int]]:
    """Return host and port of the API server from which the cluster state is read; none if that is a file.

    Raises ConfigurationError or ApiError.
    """
    if module.params["snapshot"] is not None or module.params["cluster_state"] is not None:
        return []
    from ..cluster.api.connection import ApiConnection, resolve

    return [resolve(ApiConnection(**api_parameters(module.params, os.environ))).address()[1:]]


def has_source(module: AnsibleModule) -> bool:
    """Return whether the options or the environment name a source of the cluster state."""
    given = module.params["snapshot"] is not None or module.params["cluster_state"] is not None
    return given or has_api_source(api_parameters(module.params, os.environ))


def cluster_objects(module: AnsibleModule, others: Sequence[ResourceType] = ()) -> Callable[[], Iterable[Any]]:
    """Return a function that yields the raw objects of the source that the options name, which may be a file.

    ``others``: further collections to read from an API server. Raises ConfigurationError, SnapshotError, ApiError; so
    does the function for a file.
    """
    path, given = module.params["snapshot"], module.params["cluster_state"]
    if path is not None:
        return functools.partial(snapshot_objects, path)
    if given is None and not has_source(module):
        raise ConfigurationError(
            "no source of the cluster state: give snapshot (a file), cluster_state (a few objects), "
            f"or an API server with {_NO_SERVER}"
        )
    objects = given if given is not None else read_cluster_objects(module, others)
    return functools.partial(iter, objects)
