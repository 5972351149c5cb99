# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the agent does with configSyncPeriod, syncPeriod and logging of its configuration."""

from __future__ import annotations

import io
import time
from types import SimpleNamespace

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.agent.daemon import Agent
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.options import AgentOptions
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.surface.log import Log
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.sync.syncer import Outcome

HEAD = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"


class Syncs:
    """Stands for the syncer: a sync takes ``seconds`` and observes the kernel if a family is suspect."""

    def __init__(self, monkeypatch, seconds=0.0):
        self.suspects, self.last_error, self.seconds, self.observed = {"IPv4": "start"}, "", seconds, 0
        self.offset = 0.0
        clock = time.monotonic
        monkeypatch.setattr(time, "monotonic", lambda: clock() + self.offset)

    def count_rules(self, _proxy, _family):
        """Nothing to count."""

    def repair_parameters(self, _wanted):
        """Nothing to repair."""

    def sync(self, _proxy):
        observed = bool(self.suspects)
        self.suspects = {}
        self.observed += observed
        self.offset += self.seconds
        return Outcome(True, [], 0, observed)


def started(tmp_path, text, syncs):
    """An agent that has made its first sync, without API server, kernel and sockets."""
    path = tmp_path / "config.conf"
    path.write_text(HEAD + text)
    agent = Agent(AgentOptions(configuration=str(path)), Log(io.StringIO()))
    family = SimpleNamespace(family="IPv4", draining={}, summaries=SimpleNamespace())
    agent.proxy = SimpleNamespace(configuration=agent.configuration, families=(family,), sysctls={})
    agent.syncer = syncs
    agent.drift = SimpleNamespace(settled=lambda _changed, _observed: None, delay=lambda _now: 3600.0)
    agent._ready_sent = True
    agent._show_status = lambda: None
    agent._sync()
    return agent


@pytest.mark.parametrize(
    ("text", "seconds", "pause"),
    [
        ("configSyncPeriod: 40s", 0.0, 40.0),
        ("mode: ipvs\nipvs: {syncPeriod: 20s}", 0.0, 20.0),
        ("mode: ipvs\nipvs: {syncPeriod: 20s}", 2.0, 200.0),
    ],
)
def test_everything_is_checked_after_the_period_and_not_before(tmp_path, monkeypatch, text, seconds, pause):
    syncs = Syncs(monkeypatch, seconds)
    agent = started(tmp_path, text, syncs)
    assert syncs.observed == 1
    syncs.offset += pause - 5
    agent._run_timers()
    assert syncs.suspects == {} and not agent.schedule.requested
    assert agent._delay() <= 10
    syncs.offset += 10
    agent._run_timers()
    assert syncs.suspects == {"IPv4": "regular check"} and agent.schedule.requested
    agent._sync()
    assert syncs.observed == 2
    syncs.offset += pause + 10
    agent._run_timers()
    assert syncs.suspects, "checks go on"


def test_changes_in_between_do_not_put_the_check_off(tmp_path, monkeypatch):
    syncs = Syncs(monkeypatch)
    agent = started(tmp_path, "configSyncPeriod: 40s", syncs)
    for _change in range(3):
        syncs.offset += 15
        agent._run_timers()
        agent._sync()
    assert syncs.observed == 2


@pytest.mark.parametrize(
    ("text", "options", "shown", "as_json"),
    [
        ("logging: {verbosity: 3}", {}, False, False),
        ("logging: {verbosity: 4}", {}, True, False),
        ("logging: {format: json}", {"verbose": True}, True, True),
        ("logging: {format: json}", {"log_format": "text"}, False, False),
    ],
)
def test_logging_follows_the_configuration(tmp_path, text, options, shown, as_json):
    path = tmp_path / "config.conf"
    path.write_text(HEAD + text)
    log = Log(io.StringIO())
    agent = Agent(AgentOptions(configuration=str(path), **options), log)
    assert (log.verbose, log.as_json) == (shown, as_json)
    path.write_text(HEAD + "logging: {verbosity: 5, format: json}")
    agent._reload_configuration()
    assert log.verbose is True and log.as_json is (options.get("log_format") != "text")
