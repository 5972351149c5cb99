# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The settings of a run, from the command line."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from .corrections import KUBE_PROXY


@dataclass(frozen=True)
class RunnerOptions:
    """How the proxy is started. *command* and *cleanup* are shell-like words with placeholders.

    *oneshot*: the command converges once in every step, instead of running along. *iptables*: the variant (nft,
    legacy, system) that is found on PATH. *single_stack* hides ip6tables in cases of IPv4 alone. *behaviour*: that of
    kube-proxy, or ``corrected``, and with it the expectations. *ipvs_filter_backend*: that of the configuration, if
    any.
    """

    mode: str
    command: str
    cleanup: str | None = None
    oneshot: bool = False
    iptables: str = "system"
    single_stack: bool = False
    behaviour: str = KUBE_PROXY
    ipvs_filter_backend: str = ""


@dataclass(frozen=True)
class RunOptions:
    """How cases are run.

    *instance* keeps labs that run at once apart. *time_scale* multiplies every wait. *settle*: seconds between the
    convergence of a daemon and the traffic. *sync_metrics*: where a daemon counts its passes, if it does.
    *want_state*: keep what was programmed. *skipped_kinds*: kinds of flows that are not run.
    *flows_of*: the mode whose flows are run, where a flow belongs to some modes only; that of the runner if empty.
    """

    runner: RunnerOptions
    instance: str = "0"
    time_scale: float = 1.0
    settle: float = 0.2
    sync_metrics: str | None = None
    keep_logs: str | None = None
    want_state: bool = False
    skipped_kinds: Collection[str] = ()
    flows_of: str = ""
