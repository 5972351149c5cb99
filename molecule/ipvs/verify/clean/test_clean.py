# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A node from which everything was removed is in its state from before."""

from __future__ import annotations

import json

from tests.molecule_support.portrait import differences


def test_node_is_as_it_was_before(node, scenario):
    place = scenario.place(node.lab)
    before, after = (json.loads((place / f"{name}.json").read_text(encoding="utf-8")) for name in ("before", "after"))
    assert before["units"]
    assert [line for line in differences(before, after) if not line.startswith("boot")] == []


def test_virtual_addresses_do_not_answer(node):
    assert node.ask("10.96.0.10", 80, timeout=1).outcome != "answer"
    assert node.host.run("ip link show kube-ipvs0").rc != 0
