# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Event source of Event-Driven Ansible: what the agents of a cluster report.

ansible-rulebook runs this file alone, without Ansible's loader of collections, so the file loads the collection's
shared code from its own directory.
"""

from __future__ import annotations

DOCUMENTATION = r"""
---
short_description: Events of the agents of kubenode.proxy
description:
  - Reads the Events that agents post to the API server of the cluster (events.k8s.io) - drift, repairs, refused
    objects, failed checks of endpoints, changes of the mode, drains.
  - The account needs to list and to watch events of the API group events.k8s.io in all namespaces, and to get nodes.
    A user who may create Events can forge those of agents. So an Event about a Node counts only in the namespace
    default, one about an object only in that of the object, and an event names a node only if the cluster has it.
  - If no option and no environment variable names an API server, the ServiceAccount of the pod is used.
options:
  kubeconfig:
    description:
      - Path of a kubeconfig file.
      - If not given, the environment variables K8S_AUTH_KUBECONFIG and KUBECONFIG are used.
    type: path
  context:
    description: Name of a context in the kubeconfig file. K8S_AUTH_CONTEXT if not given.
    type: str
  host:
    description: URL of the API server. K8S_AUTH_HOST if not given.
    type: str
  api_key:
    description: Bearer token. K8S_AUTH_API_KEY if not given.
    type: str
  ca_cert:
    description: Path of the certificate of the API server's authority. K8S_AUTH_SSL_CA_CERT if not given.
    type: path
  client_cert:
    description: Path of a client certificate. K8S_AUTH_CERT_FILE if not given.
    type: path
  client_key:
    description: Path of the private key of the client certificate. K8S_AUTH_KEY_FILE if not given.
    type: path
  validate_certs:
    description: Whether to verify the API server's certificate. K8S_AUTH_VERIFY_SSL if not given.
    type: bool
  api_timeout:
    description: Timeout of one request to the API server, in seconds.
    type: float
    default: 30.0
  kinds:
    description: Kinds of events to emit; all if not given. See the examples for their names.
    type: list
    elements: str
    choices:
      - drift
      - repair
      - refused
      - check_failed
      - check_passed
      - mode_changed
      - endpoints_lost
      - memory
      - drain_started
      - drain_ended
      - started
      - other
  replay:
    description:
      - Whether to also emit the Events that exist when the source starts. The API server keeps them for an hour by
        default.
    type: bool
    default: false
"""

EXAMPLES = r"""
- name: Repair what agents cannot
  hosts: k8s_cluster
  sources:
    - kubenode.proxy.agent_events:
        kubeconfig: /etc/kubernetes/automation.conf
        kinds: [drift, repair]
      filters:
        # Limits the playbook to the node of the event.
        - eda.builtin.insert_hosts_to_meta:
            host_path: agent_event.node
  rules:
    - name: A node differs and its agent cannot repair it
      # Without a node, the playbook would run on all hosts.
      condition: event.agent_event.kind == "drift" and event.agent_event.node != ""
      throttle:
        once_within: 10 minutes
        group_by_attributes:
          - event.agent_event.node
      action:
        run_playbook:
          name: kubenode.proxy.agent
"""

import asyncio
import importlib
import importlib.util
import logging
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, Callable

_ENGINE = "kubenode_proxy_engine"
_DIRECTORY = Path(__file__).resolve().parents[4] / "plugins" / "module_utils"
_CONNECTION = (
    *("kubeconfig", "context", "host", "api_key"),
    *("ca_cert", "client_cert", "client_key", "validate_certs"),
)
_LOGGER = logging.getLogger("kubenode.proxy.agent_events")


def engine(name: str) -> ModuleType:
    """Return a module of the collection's shared code, such as ``cluster.api``."""
    if _ENGINE not in sys.modules:
        start = _DIRECTORY / "__init__.py"
        spec = importlib.util.spec_from_file_location(_ENGINE, start, submodule_search_locations=[str(_DIRECTORY)])
        if spec is None or spec.loader is None:
            raise ImportError(f"{start} cannot be loaded")
        package = importlib.util.module_from_spec(spec)
        sys.modules[_ENGINE] = package
        spec.loader.exec_module(package)
    return importlib.import_module(f"{_ENGINE}.{name}")


def checked(args: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a rulebook with defaults for those that it does not set. Raises ValueError."""
    known = (*_CONNECTION, "api_timeout", "kinds", "replay")
    unknown = sorted(set(args) - set(known))
    if unknown:
        raise ValueError(f"agent_events: unknown options: {', '.join(unknown)}")
    kinds = args.get("kinds") or []
    possible = engine("controller.agent_events").KINDS
    wrong = [str(kind) for kind in kinds if kind not in possible] if isinstance(kinds, list) else [str(kinds)]
    if wrong:
        raise ValueError(f"agent_events: kinds: {', '.join(wrong)} is not in the list {', '.join(possible)}")
    return {
        "connection": {name: args.get(name) for name in _CONNECTION},
        "timeout": float(args.get("api_timeout") or 30.0),
        "kinds": kinds,
        "replay": bool(args.get("replay")),
    }


def connector(options: dict[str, Any]) -> Callable[[], Any]:
    """Return a function that returns a new client of the API server."""
    arguments, api, connections = (
        engine(name) for name in ("module_support.arguments", "cluster.api.client", "cluster.api.connection")
    )

    def connect() -> Any:
        connection = connections.ApiConnection(**arguments.api_parameters(options["connection"], os.environ))
        client = api.ApiClient(connection, options["timeout"])
        for warning in client.warnings:
            _LOGGER.warning(warning)
        return client

    return connect


async def main(queue: asyncio.Queue, args: dict[str, Any]) -> None:
    """Put the Events of agents into the queue until the task is cancelled."""
    options = checked(args)
    follower = engine("controller.agent_events").EventFollower(
        connector(options),
        kinds=options["kinds"],
        replay=options["replay"],
        failed=lambda reason: _LOGGER.warning("%s", reason),
    )
    events = follower.events()
    pending = None
    try:
        while True:
            # The next Event is read only after the queue has accepted the last one.
            pending = asyncio.ensure_future(asyncio.to_thread(next, events, None))
            event = await asyncio.shield(pending)
            if event is None:
                return
            await queue.put(event)
    finally:
        # The thread may be about to send a request, which an earlier call does not abort.
        while pending is not None and not pending.done():
            follower.stop()
            await asyncio.wait({pending}, timeout=0.2)
        follower.stop()
