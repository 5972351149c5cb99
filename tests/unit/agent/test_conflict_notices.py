# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The log lines and the metric about addresses that several Services claim."""

from __future__ import annotations

from tests.lab import manifests
from tests.unit.agent.sync_bench import SyncBench

TEXT = "an address is claimed twice"


def contender(number, day=2, addresses=2):
    return manifests.service(
        f"s{number}",
        f"10.96.0.{number}",
        [manifests.port(80)],
        namespace="d",
        metadata={"creationTimestamp": f"2026-01-{day:02}T00:00:00Z"},
        externalIPs=[f"203.0.113.{each}" for each in range(addresses)],
    )


def logged(bench):
    """Return the conflicts logged since the last call."""
    lines = [line for line in bench.text.getvalue().splitlines() if TEXT in line]
    bench.text.truncate(0)
    return [line.partition('conflict="')[2].rstrip('"') for line in lines]


def counted(bench):
    return bench.metrics.registry.get_sample_value("kubenode_proxy_conflicts")


def test_each_new_conflict_is_logged_once_and_many_are_counted(monkeypatch):
    bench = SyncBench(monkeypatch)
    bench.put(contender(1), contender(2))
    bench.sync.sync(first=True)
    assert logged(bench) == [
        f"203.0.113.{each}:80/TCP is claimed by Service d/s1 (external IP) and Service d/s2 (external IP); d/s1 gets it"
        for each in range(2)
    ]
    assert counted(bench) == 2
    bench.put(contender(3))
    bench.sync.sync()
    lines = logged(bench)
    assert len(lines) == 2 and all("Service d/s3" in line for line in lines) and counted(bench) == 4
    bench.put(contender(4, day=1))
    bench.sync.sync()
    lines = logged(bench)
    assert len(lines) == 6 and lines[5] == "1 more addresses or node ports are claimed by several Services"
    assert all("d/s4 gets it" in line for line in lines[:5]) and counted(bench) == 6
    bench.delete(contender(4), contender(3), contender(2))
    bench.sync.sync()
    assert logged(bench) == [] and counted(bench) == 0
