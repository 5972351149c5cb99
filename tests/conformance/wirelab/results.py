# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The types of observations, as the recordings have them."""

from __future__ import annotations

from typing import Any, TypedDict


class FlowResult(TypedDict, total=False):
    """The result of a flow: ``flow``, and one of ``outcomes``, ``http``, ``cmd`` and ``metrics``."""

    flow: str
    sent: list[str]
    outcomes: dict[str, int]
    http: dict[str, Any]
    cmd: dict[str, Any]
    metrics: dict[str, Any]


class StepResult(TypedDict):
    """The flows of one step of a case, in the order of the case."""

    step: str
    flows: list[FlowResult]
