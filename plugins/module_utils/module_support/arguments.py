# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Argument specifications that several modules share, and the environment variables that replace unset options."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any, ContextManager, Mapping

from ..base.errors import ConfigurationError
from ..base.installed import STATE_DIRECTORY
from ..base.mode_names import AUTO, IPTABLES, MODES
from ..convergence.defaults import DEFAULT_LOCK_SECONDS

if TYPE_CHECKING:
    from ansible.module_utils.basic import AnsibleModule

    from ..cluster.api.client import ApiClient
    from ..cluster.api.connection import ApiConnection

Spec = dict[str, dict[str, Any]]

# Option -> environment variables, of which the first that is set wins: kubernetes.core's names, then kubectl's.
_ENVIRONMENT: dict[str, tuple[str, ...]] = {
    "kubeconfig": ("K8S_AUTH_KUBECONFIG", "KUBECONFIG"),
    "context": ("K8S_AUTH_CONTEXT",),
    "host": ("K8S_AUTH_HOST",),
    "api_key": ("K8S_AUTH_API_KEY",),
    "ca_cert": ("K8S_AUTH_SSL_CA_CERT",),
    "client_cert": ("K8S_AUTH_CERT_FILE",),
    "client_key": ("K8S_AUTH_KEY_FILE",),
    "validate_certs": ("K8S_AUTH_VERIFY_SSL",),
}

API_OPTIONS: tuple[str, ...] = tuple(_ENVIRONMENT)

# With any of these options, the cluster state is read from an API server.
API_SOURCES: tuple[str, ...] = ("kubeconfig", "context", "host")


def api_spec() -> Spec:
    """Return the options that name the API server and the credentials.

    They have no ``fallback`` to the environment, because Ansible treats a fallback like a given option: KUBECONFIG in
    the environment would exclude the option ``snapshot``. See :func:`api_parameters`.
    """
    return {
        "kubeconfig": {"type": "path"},
        "context": {"type": "str"},
        "host": {"type": "str"},
        "api_key": {"type": "str", "no_log": True},
        "ca_cert": {"type": "path", "aliases": ["ssl_ca_cert"]},
        "client_cert": {"type": "path", "aliases": ["cert_file"]},
        "client_key": {"type": "path", "no_log": False, "aliases": ["key_file"]},
        "validate_certs": {"type": "bool", "aliases": ["verify_ssl"]},
        "api_timeout": {"type": "float", "default": 30.0},
    }


def source_spec() -> Spec:
    """Return the options that name the source of the cluster state: a file, a few objects, or an API server."""
    return {"snapshot": {"type": "path"}, "cluster_state": {"type": "list", "elements": "dict"}, **api_spec()}


def proxy_spec() -> Spec:
    """Return the options of the service proxy itself, which converging and inspecting share."""
    return {
        "mode": {"type": "str", "choices": [AUTO, *MODES]},
        "node_name": {"type": "str"},
        "config": {"type": "path"},
        "configuration": {"type": "dict"},
        "node_configuration": {"type": "dict"},
        "static_services": {"type": "list", "elements": "dict"},
        "fallback": {"type": "str", "choices": [IPTABLES]},
        "ignore_findings": {"type": "list", "elements": "str", "default": []},
        "outside_host": {"type": "bool", "default": False},
        **convergence_spec(),
    }


def convergence_spec() -> Spec:
    """Return the options of all modules that converge a node or predict what a convergence would change."""
    return {
        "lock_timeout": {"type": "float", "default": DEFAULT_LOCK_SECONDS},
        "state_directory": {"type": "path", "default": STATE_DIRECTORY},
        "diff_lines": {"type": "int", "default": 200},
    }


# Several options may describe the API server; together they are one source.
SOURCES_EXCLUDE: tuple[tuple[str, ...], ...] = (
    ("snapshot", "cluster_state"),
    *(("snapshot", option) for option in API_SOURCES),
    *(("cluster_state", option) for option in API_SOURCES),
    ("config", "configuration"),
)


def api_parameters(parameters: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the connection options, with unset ones taken from the environment; None if it does not set them either.

    ``parameters`` are the module's, ``environment`` is ``os.environ``. A boolean in the environment is parsed as
    Ansible does: 0, no, off, false (in upper or lower case) are false, anything else is true.
    """
    chosen: dict[str, Any] = {}
    for option, variables in _ENVIRONMENT.items():
        value = parameters.get(option)
        if value is None:
            text = next((environment[name] for name in variables if environment.get(name)), None)
            value = text
            if option == "validate_certs" and text is not None:
                value = text.strip().lower() not in ("0", "n", "no", "off", "f", "false")
        chosen[option] = value
    return chosen


def has_api_source(chosen: Mapping[str, Any]) -> bool:
    """Return whether the result of :func:`api_parameters` names an API server."""
    return any(chosen[option] for option in API_SOURCES)


def api_connection(parameters: Mapping[str, Any], environment: Mapping[str, str]) -> ApiConnection:
    """Return the connection from a module's options and the environment. Raises ConfigurationError if there is none."""
    chosen = api_parameters(parameters, environment)
    if not has_api_source(chosen):
        raise ConfigurationError(
            "no API server: give kubeconfig, context or host (of a role: agent_admin_kubeconfig or "
            "service_proxy_kubeconfig), or set K8S_AUTH_KUBECONFIG or KUBECONFIG"
        )
    from ..cluster.api.connection import ApiConnection

    return ApiConnection(**chosen)


def connected(module: AnsibleModule) -> ContextManager[ApiClient]:
    """Return a client of the API server that the options or the environment name. Raises ConfigurationError."""
    from ..cluster.api.client import ApiClient

    return contextlib.closing(ApiClient(api_connection(module.params, os.environ), module.params["api_timeout"]))
