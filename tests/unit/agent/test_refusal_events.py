# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the agent logs and posts about invalid objects."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any

from ansible_collections.kubenode.proxy.plugins.module_utils.agent.api.events import Content, make_event, node_reference
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.services.notices import RefusalEvents
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.telemetry.log import MOST_OF_NAMESPACE
from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import Refusal
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.files.static import StaticDirectory
from tests.unit.agent.reports_in_memory import reports_to


def refusals(count: int, namespace: str = "shop") -> tuple[Refusal, ...]:
    return tuple(Refusal("Service", namespace, f"s{number}", "spec.clusterIP", "is missing") for number in range(count))


def test_each_refusal_is_reported_once_and_many_of_a_namespace_by_their_number() -> None:
    stream = io.StringIO()
    posted: list[Any] = []
    reports = reports_to(stream, lambda *event: posted.append(event))
    events = RefusalEvents(reports)
    events.update(refusals(2), ())
    events.update(refusals(2), ())
    assert [event[4] for event in posted] == [f"skipped: {refusal}" for refusal in refusals(2)]
    assert len(stream.getvalue().splitlines()) == 2
    # Each sync has others, as when objects are created and deleted again.
    for number in range(3, MOST_OF_NAMESPACE + 6):
        events.update(refusals(number)[-1:], ())
    events.update(refusals(3, "other"), ())
    assert [event[4].count("other/") for event in posted] == [0] * MOST_OF_NAMESPACE + [1] * 3
    reports.limited.report(everything=True)
    lines = stream.getvalue().splitlines()
    assert len(lines) == len(posted) + 1 and "suppressed=5" in lines[-1]


def test_parts_are_reported_except_for_annotations() -> None:
    stream = io.StringIO()
    posted: list[Any] = []
    events = RefusalEvents(reports_to(stream, lambda *event: posted.append(event)))
    part = Refusal("Service", "shop", "web", "spec.externalIPs", "198.51.100.7 is outside of its ranges")
    events.update((), (part, part._replace(field="metadata.annotations[x]")))
    assert [event[2:] for event in posted] == [("ObjectRefused", "Sync", f"skipped: {part}")]
    assert stream.getvalue().count("a part of an object is skipped") == 1


def test_a_file_that_cannot_be_read_is_reported_about_the_node(tmp_path: Path) -> None:
    """Whatever its name: an Event needs the name of an object, and a digest of the text."""
    (tmp_path / os.fsdecode(b"caf\xe9.yaml")).write_text("kind: [")
    (refusal,) = StaticDirectory(str(tmp_path)).read().refusals
    posted: list[Any] = []
    events = RefusalEvents(reports_to(post=lambda *event: posted.append(event)))
    events.update((refusal,), ())
    ((about, kind, reason, action, note),) = posted
    assert about is None
    made = make_event("host", Content(node_reference("node"), kind, reason, action, note))
    assert json.dumps(made)
