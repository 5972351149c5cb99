# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The clients that the match ``recent`` remembers, from the lines of /proc/net/xt_recent."""

from __future__ import annotations

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.xtables.recent import parse_recent, ticks_now

LINES = """\
src=10.0.0.2 ttl: 64 last_seen: 4294967396 oldest_pkt: 3 4294967196, 4294967296, 4294967396
src=fd00:0010:0000:0000:0000:0000:0000:0002 ttl: 64 last_seen: 4294967000 oldest_pkt: 1 4294967000
src=10.0.0.3 ttl: 64
""".splitlines()


@pytest.mark.parametrize(
    ("client", "seconds"),
    [("10.0.0.2", 0.4), ("fd00:10::2", 1.984), ("10.0.0.3", None), ("10.0.0.20", None)],
)
def test_seconds_since_a_client_was_seen(client: str, seconds: float) -> None:
    found = parse_recent(LINES, client, (1 << 32) + 200, 0.004)
    assert found == (None if seconds is None else pytest.approx(seconds))


def test_the_counter_of_ticks_begins_five_minutes_before_it_overflows() -> None:
    assert ticks_now(0.004, 300.0) == 1 << 32
    assert ticks_now(0.01, 0.0) == (1 << 32) - 30000
