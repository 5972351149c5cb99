# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The policy of a Service on this node: which of its annotations apply."""

from __future__ import annotations

from ..cluster.model import NO_POLICY, Service, ServicePolicy
from ..cluster.parsing.service_policy import MODE
from ..configuration.node_proxy import ServicePolicySettings

_NOT_STATIC = f"{MODE} is for static Services only"


def has_policy(settings: ServicePolicySettings, namespace: str) -> bool:
    """Return whether the annotations, and the label for node-local programs, in a namespace apply."""
    chosen = settings.annotated_namespaces
    return settings.annotations_enabled and (not chosen or namespace in chosen)


def reset_after(policy: ServicePolicy, settings: ServicePolicySettings) -> float:
    """Return the seconds after which connections to a removed endpoint are reset, infinite to keep them."""
    return settings.removed_endpoints if policy.reset_after is None else policy.reset_after


def is_node_local(service: Service, settings: ServicePolicySettings) -> bool:
    """Return whether a Service is left to a program on this node: it is listed, or has the label and labels apply."""
    if service.node_local and has_policy(settings, service.namespace):
        return True
    return bool(settings.local_services) and f"{service.namespace}/{service.name}" in settings.local_services


def is_forwarded(service: Service) -> bool:
    """Return whether the agent forwards the connections of a Service itself, whatever the node's mode is."""
    return service.policy.userspace and bool(service.static)


def policy_of(service: Service, settings: ServicePolicySettings) -> ServicePolicy:
    """Return the requests of a Service's annotations that apply on this node.

    An alias applies only if this project's annotation is missing. Flags belong to a scheduler, so those of an alias do
    not apply to a scheduler of this project's annotation. Only a static Service can request userspace mode, since a
    tenant must not make the agent listen on the node; it can even where annotations do not apply.
    """
    policy, aliases = service.policy, service.aliases
    if policy is NO_POLICY and aliases is NO_POLICY:
        return NO_POLICY
    if not has_policy(settings, service.namespace):
        return ServicePolicy(userspace=True) if is_forwarded(service) else NO_POLICY
    if policy.userspace and not service.static:
        policy = policy._replace(userspace=False, problems=(*policy.problems, _NOT_STATIC))
    if not settings.aliases or aliases is NO_POLICY:
        return policy
    policy = policy._replace(problems=(*policy.problems, *aliases.problems))
    if policy.scheduler:
        return policy
    return policy._replace(
        scheduler=aliases.scheduler, scheduler_flags=policy.scheduler_flags or aliases.scheduler_flags
    )
