# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Argument specifications that several modules share, and what an unset option is read from instead."""

from __future__ import annotations

from typing import Any, Dict, Mapping, Tuple

from ..cluster.connection import ApiConnection
from ..errors import ConfigurationError

Spec = Dict[str, Dict[str, Any]]

# Option -> environment variables, first one set wins; the names that kubernetes.core uses, then those of kubectl.
_ENVIRONMENT: Dict[str, Tuple[str, ...]] = {
    "kubeconfig": ("K8S_AUTH_KUBECONFIG", "KUBECONFIG"),
    "context": ("K8S_AUTH_CONTEXT",),
    "host": ("K8S_AUTH_HOST",),
    "api_key": ("K8S_AUTH_API_KEY",),
    "ca_cert": ("K8S_AUTH_SSL_CA_CERT",),
    "client_cert": ("K8S_AUTH_CERT_FILE",),
    "client_key": ("K8S_AUTH_KEY_FILE",),
    "validate_certs": ("K8S_AUTH_VERIFY_SSL",),
}

API_OPTIONS: Tuple[str, ...] = tuple(_ENVIRONMENT)

# Any of these options says that the cluster state is to be read from an API server.
API_SOURCES: Tuple[str, ...] = ("kubeconfig", "context", "host")


def api_spec() -> Spec:
    """Options that tell where the API server is and how to authenticate.

    The environment is not a ``fallback`` of the options: a fallback looks like a given option, so that KUBECONFIG in
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
    """Options that tell where the cluster state comes from: a file on the node, a few objects, or an API server."""
    return {
        "snapshot": {"type": "path"},
        "cluster_state": {"type": "list", "elements": "dict"},
        **api_spec(),
    }


def proxy_spec() -> Spec:
    """Options of the service proxy itself, common to converging and inspecting."""
    return {
        "mode": {"type": "str", "choices": ["auto", "iptables", "ipvs", "nftables"]},
        "node_name": {"type": "str"},
        "config": {"type": "path"},
        "configuration": {"type": "dict"},
        "fallback": {"type": "str", "choices": ["iptables"]},
        "ignore_findings": {"type": "list", "elements": "str", "default": []},
        "outside_host": {"type": "bool", "default": False},
        **convergence_spec(),
    }


def convergence_spec() -> Spec:
    """Options of all modules that change a node as a convergence does, or tell what one would change."""
    return {
        "lock_timeout": {"type": "float", "default": 30.0},
        "state_directory": {"type": "path", "default": "/run/kubenode-proxy"},
        "diff_lines": {"type": "int", "default": 200},
    }


# An API server is one source, whatever the number of options that describe it.
SOURCES_EXCLUDE: Tuple[Tuple[str, ...], ...] = (
    ("snapshot", "cluster_state"),
    *(("snapshot", option) for option in API_SOURCES),
    *(("cluster_state", option) for option in API_SOURCES),
    ("config", "configuration"),
)


def api_parameters(parameters: Mapping[str, Any], environment: Mapping[str, str]) -> Dict[str, Any]:
    """The connection options, those not given taken from the environment; None where neither says anything.

    ``parameters`` are the module's, ``environment`` is ``os.environ``. A truth value in the environment is read as
    Ansible reads one: 0, no, off, false (in any case) are false, anything else is true.
    """
    chosen: Dict[str, Any] = {}
    for option, variables in _ENVIRONMENT.items():
        value = parameters.get(option)
        if value is None:
            text = next((environment[name] for name in variables if environment.get(name)), None)
            value = text if option != "validate_certs" or text is None else _is_true(text)
        chosen[option] = value
    return chosen


def _is_true(text: str) -> bool:
    return text.strip().lower() not in ("0", "n", "no", "off", "f", "false")


def has_api_source(chosen: Mapping[str, Any]) -> bool:
    """Whether the result of :func:`api_parameters` names an API server."""
    return any(chosen[option] for option in API_SOURCES)


def api_connection(parameters: Mapping[str, Any], environment: Mapping[str, str]) -> ApiConnection:
    """The connection that a module's options and the environment tell. Raises ConfigurationError if they tell none."""
    chosen = api_parameters(parameters, environment)
    if not has_api_source(chosen):
        raise ConfigurationError("no API server: give kubeconfig, context or host, or set K8S_AUTH_KUBECONFIG")
    return ApiConnection(**chosen)
