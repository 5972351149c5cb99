# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""``python -m tests.documentation.public_surface``: write the list of all public names.

Playbooks, inventories, alerts and scripts of users contain these names, so none may disappear by accident: a test
compares them with the committed list. A change on purpose writes it again, so that a review shows the difference.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any, Iterator, Mapping

from tests.conftest import ROOT
from tests.documentation import collection
from tests.documentation.playbook_variables import VARIABLES
from tests.monitoring.expressions import exported, exported_on_request

PAGE = ROOT / "tests" / "documentation" / "public-surface.txt"


def public_names() -> list[str]:
    """Return a line for each public name: what it is, its owner if it has one, and the name."""
    return sorted({*_plugins(), *_roles(), *_playbooks(), *_configuration(), *_commands(), *_telemetry()})


def page() -> str:
    """Return the content of the list."""
    return "\n".join(public_names()) + "\n"


def _plugins() -> Iterator[str]:
    documented: dict[str, Mapping[str, Any]] = {
        **{f"module {name}": item for name, item in collection.modules().items()},
        **{f"inventory plugin {name}": item for name, item in collection.inventories().items()},
    }
    for owner, item in documented.items():
        yield from (f"{owner}: option {name}" for name in _nested(item["doc"].get("options"), "suboptions"))
        yield from (f"{owner}: result {name}" for name in _nested(item.get("return"), "contains"))


def _nested(fields: Any, inner: str, prefix: str = "") -> Iterator[str]:
    """Yield the names of documented fields, those inside others after the outer name and a dot."""
    for name, field in (fields or {}).items():
        yield prefix + name
        for choice in field.get("choices") or ():
            yield f"{prefix}{name} = {choice}"
        yield from _nested(field.get(inner), inner, f"{prefix}{name}.")


def _roles() -> Iterator[str]:
    for role in collection.roles():
        for entry, specification in role.entry_points.items():
            yield from (f"role {role.name}, {entry}: variable {name}" for name in specification.get("options", {}))


def _playbooks() -> Iterator[str]:
    yield from (f"playbook {name}" for name in collection.playbook_names())
    for variable in VARIABLES:
        yield from (f"playbook {playbook}: variable {variable.name}" for playbook in variable.playbooks)


def _configuration() -> Iterator[str]:
    from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.parsing import (
        health_check,
        service,
        service_policy,
        weight,
    )
    from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.fields import FIELDS, NODE_FIELDS

    yield from (f"KubeProxyConfiguration: field {field.name}" for field in FIELDS)
    yield from (f"NodeProxyConfiguration: field {field.name}" for field in NODE_FIELDS)
    annotations = (*service_policy.SERVICE_ANNOTATIONS, health_check.CHECK, weight.WEIGHT)
    yield from (f"annotation {name}" for name in annotations)
    yield from (f"label {name}" for name in (service.OUTSIDE_HOSTS_LABEL, service.NODE_LOCAL_LABEL))


def _commands() -> Iterator[str]:
    from ansible_collections.kubenode.proxy.plugins.module_utils.command.cli import make_parser

    for action in make_parser()._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command, parser in action.choices.items():
                yield f"kubenode-proxy {command}"
                for option in parser._actions:
                    yield from (f"kubenode-proxy {command}: option {name}" for name in option.option_strings)


def _telemetry() -> Iterator[str]:
    from ansible_collections.kubenode.proxy.plugins.module_utils.agent.telemetry import metric_tables
    from ansible_collections.kubenode.proxy.plugins.module_utils.event_reasons import Reason

    yield from (f"Event: reason {reason.value}" for reason in Reason)
    yield from (f"metric {name}" for name in exported() | exported_on_request())
    for table in metric_tables.TABLES:
        for metric in metric_tables.declared(table).values():
            yield from (f"metric {metric.name}: label {label}" for label in metric.labels)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    sys.stdout.write(f"{len(public_names())} names written to {PAGE.relative_to(ROOT)}\n")
