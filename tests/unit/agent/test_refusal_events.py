# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the agent logs and posts about invalid objects."""

from __future__ import annotations

import io
from typing import Any, List, Tuple

from ansible_collections.kubenode.proxy.plugins.module_utils.agent.surface.log import LimitedLog, Log
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.sync.refusal_events import MOST, RefusalEvents
from ansible_collections.kubenode.proxy.plugins.module_utils.errors import Refusal


def refusals(count: int) -> Tuple[Refusal, ...]:
    return tuple(Refusal("Service", "shop", f"s{number}", "spec.clusterIP", "is missing") for number in range(count))


def test_each_refusal_is_reported_once_and_many_by_their_number() -> None:
    stream = io.StringIO()
    posted: List[Any] = []
    events = RefusalEvents(LimitedLog(Log(stream)), lambda *event: posted.append(event))
    events.update(refusals(2))
    events.update(refusals(2))
    assert [event[4] for event in posted] == [f"skipped: {refusal}" for refusal in refusals(2)]
    assert len(stream.getvalue().splitlines()) == 2
    events.update(refusals(2 + MOST + 5))
    assert len(posted) == 2 + MOST
    last = stream.getvalue().splitlines()[-1]
    assert "further invalid objects are skipped" in last and "objects=5" in last
