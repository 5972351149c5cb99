# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which parts of a result are compared."""

from __future__ import annotations

from tests.conformance.wirelab.outcomes import Rules, compare, meaning


def traffic(flow, sent, *outcomes):
    return {"flow": flow, "sent": sent, "outcomes": dict.fromkeys(outcomes, 7)}


POD = "tcp pod1 -> 10.96.1.1:80"
FROM_POD = ["10.244.1.11"]


def test_counts_do_not_matter():
    first = {"flow": POD, "sent": FROM_POD, "outcomes": {"10.244.2.11:80 from 10.244.1.11": 1}}
    second = {"flow": POD, "sent": FROM_POD, "outcomes": {"10.244.2.11:80 from 10.244.1.11": 35}}
    assert meaning(first) == meaning(second)


def test_masqueraded_is_not_the_same_as_the_senders_own_address():
    own = traffic(POD, FROM_POD, "10.244.2.11:80 from 10.244.1.11")
    masqueraded = traffic(POD, FROM_POD, "10.244.2.11:80 from 172.18.0.2")
    other = traffic(POD, FROM_POD, "10.244.2.11:80 from 10.244.1.1")
    assert meaning(own) != meaning(masqueraded)
    assert meaning(masqueraded) == meaning(other)
    assert meaning(masqueraded, Rules(strict=True)) != meaning(other, Rules(strict=True))


def test_a_missing_endpoint_is_a_difference():
    both = traffic(POD, FROM_POD, "10.244.2.11:80 from 10.244.1.11", "10.244.3.11:80 from 10.244.1.11")
    one = traffic(POD, FROM_POD, "10.244.2.11:80 from 10.244.1.11")
    assert meaning(both) != meaning(one)


def test_the_kind_of_refusal_counts_unless_loose():
    icmp, reset = traffic(POD, [], "reject icmp 3/3"), traffic(POD, [], "reject rst")
    drop = traffic(POD, [], "drop")
    assert meaning(icmp) != meaning(reset)
    assert meaning(icmp, Rules(loose=True)) == meaning(reset, Rules(loose=True))
    assert meaning(icmp, Rules(loose=True)) != meaning(drop, Rules(loose=True))


def test_sticky_flows_compare_the_number_of_endpoints():
    flow = POD + " sticky"
    here = traffic(flow, FROM_POD, "10.244.2.11:80 from 10.244.1.11")
    there = traffic(flow, FROM_POD, "10.244.3.11:80 from 10.244.1.11")
    both = traffic(flow, FROM_POD, "10.244.2.11:80 from 10.244.1.11", "10.244.3.11:80 from 10.244.1.11")
    assert meaning(here) == meaning(there)
    assert meaning(here) != meaning(both)


def test_many_asks_for_at_least_so_many():
    flow = POD + " many=2"
    endpoints = [f"10.244.2.{number}:80 from 10.244.1.11" for number in range(11, 15)]
    assert meaning(traffic(flow, FROM_POD, *endpoints)) == meaning(traffic(flow, FROM_POD, *endpoints[:2]))
    assert meaning(traffic(flow, FROM_POD, *endpoints)) != meaning(traffic(flow, FROM_POD, endpoints[0]))


def test_chance_hides_which_source_the_node_used():
    flow = "tcp node -> 10.96.1.1:80 sticky"
    local = traffic(flow, ["172.18.0.2"], "10.244.1.11:80 from 10.244.1.1")
    remote = traffic(flow, ["172.18.0.2"], "10.244.2.11:80 from 172.18.0.2")
    assert meaning(local) == meaning(remote)


def test_compare_counts_and_names_differences():
    recorded = [{"step": "start", "flows": [traffic(POD, [], "drop"), traffic("udp pod1 -> 1.2.3.4:5", [], "drop")]}]
    observed = [{"step": "start", "flows": [traffic(POD, [], "drop"), traffic("udp pod1 -> 1.2.3.4:5", [], "reset")]}]
    comparison = compare(recorded, observed)
    assert (comparison.equal, comparison.total) == (1, 2)
    (difference,) = comparison.differences
    assert (difference.step, difference.flow) == ("start", "udp pod1 -> 1.2.3.4:5")
    assert (difference.recorded, difference.observed) == ({"drop": 7}, {"reset": 7})


def test_a_flow_that_was_not_run_is_a_difference():
    recorded = [{"step": "start", "flows": []}, {"step": "next", "flows": [traffic(POD, [], "drop")]}]
    comparison = compare(recorded, recorded[:1])
    assert (comparison.equal, comparison.total) == (0, 1)
    assert comparison.differences[0].observed is None


def test_the_same_flow_twice_is_compared_in_order():
    first, second = traffic(POD, [], "drop"), traffic(POD, [], "reset")
    step = [{"step": "start", "flows": [first, second]}]
    turned = [{"step": "start", "flows": [second, first]}]
    assert compare(step, step).equal == 2
    assert compare(step, turned).equal == 0


def test_kinds_can_be_excluded():
    flows = [traffic(POD, [], "drop"), {"flow": "http node -> http://1.2.3.4:5/", "http": {"status": 200}}]
    comparison = compare(
        [{"step": "s", "flows": flows}], [{"step": "s", "flows": flows[:1]}], Rules(skipped_kinds=("http",))
    )
    assert (comparison.equal, comparison.total, comparison.differences) == (1, 1, [])


def test_commands_compare_status_and_output():
    recorded = {"flow": "cmd ls", "cmd": {"rc": 0, "output": ["a"]}}
    assert meaning(recorded) != meaning({"flow": "cmd ls", "cmd": {"rc": 0, "output": ["b"]}})
    assert meaning(recorded) != meaning({"flow": "cmd ls", "cmd": {"rc": 1, "output": ["a"]}})
