# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A second run changes nothing, whatever a task of iptables_chains or sysctls says; see second_runs.py."""

from __future__ import annotations

import itertools
import json
import os
from typing import Any

import pytest

from tests.modules.second_runs import declared, faults, in_pairs

FULL = bool(os.environ.get("FULL"))

#: In other words than those of iptables-save: aliases, names of ports, masks, orders, quotes, old and short forms.
RULES = """
-p TCP --dport ssh -j ACCEPT
-p tcp --dport http:https -j RETURN
-p 6 --sport 1024: -j RETURN
--protocol udp --destination-port domain --jump ACCEPT
-p tcp --dport 80 -m tcp -j RETURN
-m tcp -p tcp --dport :1023
-s 10.0.0.0/255.0.0.0 -j DROP
-s 10.1.2.3/8 -j RETURN
-d 0/0 -j RETURN
-d 192.0.2.1/32 ! -s 192.0.2.0/24 -j RETURN
! -p udp -j RETURN
-m comment --comment plain -j RETURN
-m comment --comment 'two words' -j RETURN
-j RETURN -m comment --comment last
-m state --state NEW,ESTABLISHED -j ACCEPT
-m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
-m conntrack --ctstate established -j ACCEPT
-m limit --limit 120/minute --limit-burst 7 -j RETURN
-m limit --limit 1/s
-m mark --mark 16 -j RETURN
-m mark --mark 0x01/0xff -j RETURN
-j MARK --set-mark 1
-j MARK --or-mark 4
-j MARK --and-mark 0xf
-p icmp --icmp-type ping -j ACCEPT
-p icmp -m icmp --icmp-type 8/0
-p ipv6-icmp --icmpv6-type 135 -j ACCEPT
-p icmpv6 -j ACCEPT
-m multiport -p tcp --ports 1,2,3:5 -j RETURN
-p tcp -m multiport --destination-ports www,https
-i eth+ -j RETURN
! -i lo -o eth0 -j RETURN
-m addrtype --dst-type local -j RETURN
-p tcp --syn -j RETURN
-p tcp ! --syn -m conntrack --ctstate NEW -j DROP
-p tcp --tcp-flags SYN,RST,ACK,FIN SYN -j RETURN
-m length --length 100: -j RETURN
-j REJECT
-p tcp -j REJECT --reject-with tcp-reset
-j LOG --log-prefix 'denied: ' --log-level warning
-j NFLOG --nflog-group 3 --nflog-prefix x
-p all -j RETURN
-p 47 -j ACCEPT
-p ESP -j ACCEPT
-m iprange --src-range 10.0.0.1-10.0.0.9 -j RETURN
-m mac --mac-source 00:AA:22:33:44:55 -j RETURN
-m statistic --mode random --probability 0.5 -j RETURN
-m recent --name known --set
-m hashlimit --hashlimit-upto 10/min --hashlimit-name each --hashlimit-mode srcip -j RETURN
-m connlimit --connlimit-above 3 -j DROP
-m dscp --dscp-class EF -j RETURN
-m ttl --ttl-lt 5 -j DROP
-m connmark --mark 5 -j CONNMARK --restore-mark
-p tcp --tcp-flags SYN,RST SYN -j TCPMSS --clamp-mss-to-pmtu
-s 2001:DB8::0001/64 -j RETURN
-d 2001:db8:0:0::1 -j RETURN
-s ::ffff:0:0/96 -j RETURN
-s fe80::1/ffff:: -j DROP
-g OTHER
-j NOSUCH
-p tcp --dport 70000
""".strip().splitlines()

CHAIN: dict[str, Any] = {
    "name": ["lower.case_1", "A-CHAIN-WITH-28-CHARACTERS-1", "a/b", "INPUT"],
    "table": ["nat", "mangle", "raw", "security"],
    "family": ["ipv6", "both"],
    "rules": [["-p tcp -j RETURN", "-p TCP --jump RETURN"], ["  -j RETURN  "], ["-j OTHER"], [""]],
    "jumps": [
        [],
        [{"from": "OUTPUT"}],
        [{"from": "OUTPUT", "match": "-p TCP --dport www", "position": "first"}],
        [{"from": "OUTPUT", "position": "last"}, {"from": "OUTPUT", "match": "-d 10.0.0.0/255.0.0.0"}],
    ],
}
LISTED: dict[str, Any] = {
    "chains": [[{"name": "OTHER"}, {"name": "OWN", "rules": ["-g OTHER"], "jumps": [{"from": "OUTPUT"}]}]],
    "state": ["absent", "confirmed"],
    "confirm_timeout": [-1],
    "change": ["0123"],
    "variant": ["legacy", "nft"],
    "lock_timeout": [0, 1],
}


def chains_tasks(variant: str) -> list[dict[str, Any]]:
    """Return tasks with each rule in each family, and with the values of all options."""
    assert set(CHAIN) == declared("iptables_chains", "_CHAIN") and set(LISTED) == declared("iptables_chains")
    other = {"name": "OTHER", "family": "both"}
    chains: list[dict[str, Any]] = [
        {"name": "OWN", "family": family, "rules": [rule]}
        for family in ("ipv4", "ipv6")
        for rule in (RULES if FULL else RULES[::3])
    ]
    chains += in_pairs({"name": "OWN", "rules": ["-j RETURN"], "jumps": [{"from": "OUTPUT"}]}, CHAIN, 1 + FULL)
    tasks = [{"chains": [other, chain], "variant": variant} for chain in chains]
    base = {"chains": [{"name": "OWN", "rules": ["-j RETURN"]}], "variant": variant}
    return [*tasks, *in_pairs(base, {**LISTED, "variant": [variant]}, 1 + FULL)]


@pytest.mark.parametrize("variant", ("nft", pytest.param("legacy", marks=pytest.mark.full)))
def test_chains(node, variant):
    assert faults(node, "iptables_chains", chains_tasks(variant)) == []


#: What a second chain may have in common with the first, and the ways in which each may refer to the other.
OTHERS: list[dict[str, Any]] = [
    {"name": "SECOND"},
    {"name": "SECOND", "table": "nat"},
    {"name": "SECOND", "family": "ipv6"},
    {"name": "SECOND", "family": "both"},
    {"name": "OWN"},
    {"name": "OWN", "table": "nat"},
    {"name": "OWN", "family": "ipv6"},
    {"name": "OWN", "family": "both"},
    {"name": "OWN", "table": "mangle", "family": "both"},
    {"name": "own"},
    {"name": "SECOND", "table": "mangle", "family": "both"},
]
REFERENCES: list[dict[str, Any]] = [
    {},
    {"rules": ["-j @"]},
    {"rules": ["-j RETURN"], "jumps": [{"from": "OUTPUT", "match": "-p UDP"}]},
    {"rules": ["-p tcp -g @", "-j RETURN"], "jumps": [{"from": "OUTPUT", "position": "last"}]},
    {"jumps": [{"from": "@"}]},
    {"rules": [], "jumps": []},
    {"rules": ["-j RETURN"], "jumps": [{"from": "INPUT"}, {"from": "OUTPUT", "position": "first"}]},
    {"rules": ["-p tcp --dport www"]},
]


def pairs_of_chains(variant: str) -> list[dict[str, Any]]:
    """Return tasks with two chains in both orders, each of which may refer to the other."""
    tasks = []
    for second in OTHERS:
        # A chain of the same name would refer to itself.
        ways = REFERENCES[5:] if second["name"] == "OWN" else REFERENCES
        for one, other in itertools.product(ways, ways[:4]):
            chains = [
                {"name": "OWN", **json.loads(json.dumps(one).replace("@", second["name"]))},
                {**second, **json.loads(json.dumps(other).replace("@", "OWN"))},
            ]
            tasks += [{"chains": listed, "variant": variant} for listed in (chains, chains[::-1])]
    return tasks


@pytest.mark.full
@pytest.mark.parametrize("variant", ("nft", "legacy"))
def test_pairs_of_chains(node, variant):
    """The chains of a task are removed before the next one: what a task finds would otherwise depend on the last."""
    listed = itertools.product(("OWN", "SECOND", "own"), ("filter", "nat", "mangle"))
    chains = [{"name": name, "table": table, "family": "both"} for name, table in listed]
    reset = {"chains": chains, "state": "absent", "variant": variant}
    assert faults(node, "iptables_chains", pairs_of_chains(variant), [reset]) == []


VALUES: dict[str, Any] = {
    "net.ipv4.ip_forward": [1, True, "1", " 1 ", "0x1", "01", "+1", "yes", 2, ""],
    "net.ipv4.tcp_rmem": ["4096\t131072 6000000", "4096", "0x1000 131072 6000000", "4096 131072", "4k 8k 16k"],
    "net.ipv4.ip_local_port_range": ["32768 60999", "32768\t60999", "32768-60999", "60999 32768"],
    "net.ipv4.ip_local_reserved_ports": ["1,2,3-5", "8080", "5-3", "9000-9010,8080", "1 2"],
    "net.ipv4.ping_group_range": ["0 2147483647", "1 0"],
    "net.ipv4.tcp_congestion_control": ["reno", "Reno", "nosuch"],
    "net.ipv4.conf.all.rp_filter": [0, 1, 2, "0b1", "1.0", "1 2"],
    "net.ipv4.tcp_fastopen_key": ["00000001-00000002-00000003-00000004", "1-2-3-4"],
    "net.ipv4.tcp_keepalive_time": ["7200", "2h", "7200s", "-1", "1e3", 99999999999],
    "net.ipv6.conf.default.stable_secret": ["2001:DB8::1", "::1", "no"],
    "net.ipv6.conf.lo.addr_gen_mode": [0, 1, 9],
    "net/ipv6/conf/lo/disable_ipv6": [0, 1],
    "net.ipv6.conf.eth0.103.disable_ipv6": [1],
    "net.ipv6.conf.eth0/103.disable_ipv6": [1, 0],
    "net/ipv4/conf/eth0.103/rp_filter": [2],
    "net.ipv4.conf.eth0.9999.rp_filter": [2],
    "net.ipv4.route.flush": [1],
    "net.ipv4.tcp_available_congestion_control": ["reno"],
    "net.netfilter.nf_conntrack_buckets": [4096],
    "net.core.somaxconn": [4096, "4_096"],
    "net.ipv4.nosuch": [1],
    "nodots": [1],
}
SYSCTLS: dict[str, Any] = {
    "values": [{"net.ipv4.ip_forward": "0x1", "net.ipv4.conf.lo.forwarding": 0}, {"net.ipv4.ip_forward": None}],
    "profile": [
        {"mode": "iptables", "conntrack": {"max_per_core": 0}},
        {"mode": "nftables", "reserved_node_ports": "30000-32767", "strict_arp": True, "route_localnet": True},
        {"mode": "userspace", "netdev_max_backlog": 2000, "estimation": False},
        {"mode": "ipvs", "bridge_netfilter": True},
        {"configuration": {"mode": "nftables", "conntrack": {"tcpBeLiberal": True}}},
    ],
    "state": ["absent"],
    "persistent": [False],
    "persistent_file": ["/etc/sysctl.d/50-own.conf", "/etc/sysctl.d/no-suffix", "/nowhere/x.conf"],
    "unchangeable": ["warn", "fail"],
}


def test_sysctls(node):
    node.run("ip", "link", "add", "eth0", "type", "veth", "peer", "name", "peer0")
    node.run("ip", "link", "add", "link", "eth0", "name", "eth0.103", "type", "macvlan")
    assert set(SYSCTLS) == declared("sysctls")
    tasks: list[dict[str, Any]] = [
        {"values": {key: value}, "persistent_file": "/etc/sysctl.d/50-own.conf"}
        for key, values in VALUES.items()
        for value in values
    ]
    base = {"values": {"net.ipv4.ip_forward": 1}, "persistent_file": "/etc/sysctl.d/50-own.conf"}
    tasks += in_pairs(base, SYSCTLS, 1 + FULL)
    assert faults(node, "sysctls", tasks) == []


def test_an_interface_with_a_dot_is_suggested(node):
    node.run("ip", "link", "add", "eth0.103", "type", "veth", "peer", "name", "peer0")
    task = {"kubenode.proxy.sysctls": {"values": {"net.ipv6.conf.eth0.103.disable_ipv6": 1}, "persistent": False}}
    assert node.play(task)[0]["msg"].endswith("did you mean net.ipv6.conf.eth0/103.disable_ipv6?")
