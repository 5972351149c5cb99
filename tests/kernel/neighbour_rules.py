# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Rules that neighbours of kube-proxy add to a node or a pod, for the addresses and devices of ``packet_network``.

They have the chains, positions, hooks, priorities and marks that each program documents or writes to the kernel, and of
its rules those that a Service's packets meet. Ranges replace ipsets, which not every kernel has.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class Neighbour(NamedTuple):
    """The rules of one program: input for ``iptables-restore --noflush``, input for ``nft -f``, or both.

    For IPv6 the former is input for ``ip6tables-restore``.
    """

    iptables: str = ""
    nft: str = ""


#: Felix with iptables: ChainInsertMode Insert, mark bits from 0xffff0000. Packets to workloads pass its policy chains.
CALICO_IPTABLES = """\
*raw
:cali-PREROUTING - [0:0]
:cali-OUTPUT - [0:0]
-I PREROUTING -m comment --comment "cali:6gwbT8clXdHdC1b1" -j cali-PREROUTING
-I OUTPUT -m comment --comment "cali:tVnHkvAo15HuiPy0" -j cali-OUTPUT
-A cali-PREROUTING -j MARK --set-xmark 0x0/0xf0000
-A cali-PREROUTING -i vl -j MARK --set-xmark 0x40000/0x40000
-A cali-PREROUTING -i vp -j MARK --set-xmark 0x40000/0x40000
-A cali-OUTPUT -j MARK --set-xmark 0x0/0xf0000
COMMIT
*mangle
:cali-PREROUTING - [0:0]
-I PREROUTING -m comment --comment "cali:6gwbT8clXdHdC1b1" -j cali-PREROUTING
-A cali-PREROUTING -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
COMMIT
*nat
:cali-PREROUTING - [0:0]
:cali-OUTPUT - [0:0]
:cali-POSTROUTING - [0:0]
:cali-fip-dnat - [0:0]
:cali-nat-outgoing - [0:0]
-I PREROUTING -m comment --comment "cali:6gwbT8clXdHdC1b1" -j cali-PREROUTING
-I OUTPUT -m comment --comment "cali:tVnHkvAo15HuiPy0" -j cali-OUTPUT
-I POSTROUTING -m comment --comment "cali:O3lYWMrLQYEMJtB5" -j cali-POSTROUTING
-A cali-PREROUTING -j cali-fip-dnat
-A cali-OUTPUT -j cali-fip-dnat
-A cali-POSTROUTING -j cali-nat-outgoing
-A cali-nat-outgoing -s 10.0.0.0/8 ! -d 10.0.0.0/8 -j MASQUERADE --random-fully
COMMIT
*filter
:cali-INPUT - [0:0]
:cali-FORWARD - [0:0]
:cali-OUTPUT - [0:0]
:cali-from-wl-dispatch - [0:0]
:cali-to-wl-dispatch - [0:0]
-I INPUT -m comment --comment "cali:Cz_u1IQiXIMmKD4c" -j cali-INPUT
-I FORWARD -m comment --comment "cali:wUHhoiAYhphO9Mso" -j cali-FORWARD
-I OUTPUT -m comment --comment "cali:tVnHkvAo15HuiPy0" -j cali-OUTPUT
-A FORWARD -m comment --comment "cali:S93hcgKJrXEqnTfs" -m mark --mark 0x10000/0x10000 -j ACCEPT
-A FORWARD -m comment --comment "cali:mp77cMpurHhyjLrM" -j MARK --set-xmark 0x10000/0x10000
-A cali-INPUT -m mark --mark 0x10000/0x10000 -j ACCEPT
-A cali-FORWARD -j MARK --set-xmark 0x0/0xe0000
-A cali-FORWARD -i vl -j cali-from-wl-dispatch
-A cali-FORWARD -i vp -j cali-from-wl-dispatch
-A cali-FORWARD -o vl -j cali-to-wl-dispatch
-A cali-from-wl-dispatch -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
-A cali-from-wl-dispatch -m conntrack --ctstate INVALID -j DROP
-A cali-from-wl-dispatch -j MARK --set-xmark 0x10000/0x10000
-A cali-from-wl-dispatch -m mark --mark 0x10000/0x10000 -j RETURN
-A cali-from-wl-dispatch -j DROP
-A cali-to-wl-dispatch -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
-A cali-to-wl-dispatch -m conntrack --ctstate INVALID -j DROP
-A cali-to-wl-dispatch -p tcp -m tcp --dport 80 -j MARK --set-xmark 0x10000/0x10000
-A cali-to-wl-dispatch -m mark --mark 0x10000/0x10000 -j RETURN
-A cali-to-wl-dispatch -j DROP
COMMIT
"""
#: Felix with nftables: one table, every base chain at priority 0.
CALICO_NFTABLES = """\
table ip calico {
    chain filter-FORWARD {
        type filter hook forward priority 0; policy accept;
        oifname "vl" jump filter-cali-to-wl-dispatch
        counter meta mark & 0x10000 == 0x10000 accept
    }
    chain filter-cali-to-wl-dispatch {
        ct state { established, related } accept
        ct state invalid drop
        tcp dport 80 meta mark set meta mark or 0x10000
        meta mark & 0x10000 == 0x10000 return
        drop
    }
    chain nat-PREROUTING { type nat hook prerouting priority 0; policy accept; }
    chain nat-OUTPUT { type nat hook output priority 0; policy accept; }
    chain nat-POSTROUTING {
        type nat hook postrouting priority 0; policy accept;
        ip saddr 10.0.0.0/8 ip daddr != 10.0.0.0/8 masquerade fully-random
    }
    chain mangle-PREROUTING {
        type filter hook prerouting priority 0; policy accept;
        ct state { established, related } accept
    }
    chain raw-PREROUTING {
        type filter hook prerouting priority 0; policy accept;
        meta mark set meta mark & 0xfff0ffff
    }
}
"""
#: Tailscale with iptables, whose device is that of the external client.
TAILSCALE_IPTABLES = """\
*filter
:ts-input - [0:0]
:ts-forward - [0:0]
-I INPUT -j ts-input
-I FORWARD -j ts-forward
-A ts-input -s 100.101.102.103/32 -i lo -j ACCEPT
-A ts-input -s 100.115.92.0/23 ! -i vx -j RETURN
-A ts-input -s 100.64.0.0/10 ! -i vx -j DROP
-A ts-input -i vx -j ACCEPT
-A ts-input -p udp -m udp --dport 41641 -j ACCEPT
-A ts-forward -i vx -j MARK --set-xmark 0x40000/0xff0000
-A ts-forward -m mark --mark 0x40000/0xff0000 -j ACCEPT
-A ts-forward -s 100.64.0.0/10 -o vx -j DROP
-A ts-forward -o vx -j ACCEPT
COMMIT
*nat
:ts-postrouting - [0:0]
-I POSTROUTING -j ts-postrouting
-A ts-postrouting -m mark --mark 0x40000/0xff0000 -j MASQUERADE
COMMIT
"""
#: Tailscale with nftables writes to the tables that iptables-nft uses, too.
TAILSCALE_NFTABLES = """\
table ip filter {
    chain INPUT { type filter hook input priority 0; policy accept; }
    chain FORWARD { type filter hook forward priority 0; policy accept; }
    chain ts-input {
        iifname "lo*" ip saddr 100.101.102.103 counter accept
        iifname != "vx" ip saddr 100.64.0.0/10 counter drop
        iifname "vx" counter accept
    }
    chain ts-forward {
        iifname "vx" counter meta mark set mark and 0xff00ffff or 0x40000
        meta mark & 0xff0000 == 0x40000 counter accept
        oifname "vx" ip saddr 100.64.0.0/10 counter drop
        oifname "vx" counter accept
    }
}
insert rule ip filter INPUT counter jump ts-input
insert rule ip filter FORWARD counter jump ts-forward
table ip nat {
    chain POSTROUTING { type nat hook postrouting priority 100; policy accept; }
    chain ts-postrouting { meta mark & 0xff0000 == 0x40000 counter masquerade; }
}
insert rule ip nat POSTROUTING counter jump ts-postrouting
"""
#: Docker 28 and later with iptables, which drops forwarded packets by default.
DOCKER_IPTABLES = """\
*nat
:DOCKER - [0:0]
-A PREROUTING -m addrtype --dst-type LOCAL -j DOCKER
-A OUTPUT ! -d 127.0.0.0/8 -m addrtype --dst-type LOCAL -j DOCKER
-A POSTROUTING -s 172.17.0.0/16 ! -o docker0 -j MASQUERADE
-A DOCKER ! -i docker0 -p tcp -m tcp --dport 8099 -j DNAT --to-destination 172.17.0.2:80
COMMIT
*filter
:FORWARD DROP [0:0]
:DOCKER - [0:0]
:DOCKER-BRIDGE - [0:0]
:DOCKER-CT - [0:0]
:DOCKER-FORWARD - [0:0]
:DOCKER-INTERNAL - [0:0]
:DOCKER-USER - [0:0]
-A FORWARD -j DOCKER-USER
-A FORWARD -j DOCKER-FORWARD
-A DOCKER -d 172.17.0.2/32 ! -i docker0 -o docker0 -p tcp -m tcp --dport 80 -j ACCEPT
-A DOCKER ! -i docker0 -o docker0 -j DROP
-A DOCKER-BRIDGE -o docker0 -j DOCKER
-A DOCKER-CT -o docker0 -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
-A DOCKER-FORWARD -j DOCKER-CT
-A DOCKER-FORWARD -j DOCKER-INTERNAL
-A DOCKER-FORWARD -j DOCKER-BRIDGE
-A DOCKER-FORWARD -i docker0 -j ACCEPT
COMMIT
"""
#: Docker 29 with its nftables backend: base chains that accept, and chains for its own bridges.
DOCKER_NFTABLES = """\
table ip docker-bridges {
    map filter-forward-in-jumps { type ifname : verdict; elements = { "docker0" : jump filter-forward-in__docker0 }; }
    chain filter-FORWARD {
        type filter hook forward priority filter; policy accept;
        oifname vmap @filter-forward-in-jumps
    }
    chain filter-forward-in__docker0 {
        ct state established,related counter accept
        ip daddr 172.17.0.2 tcp dport 80 counter accept
        counter drop comment "UNPUBLISHED PORT DROP"
    }
    chain nat-OUTPUT {
        type nat hook output priority -100; policy accept;
        ip daddr != 127.0.0.0/8 fib daddr type local counter jump nat-prerouting-and-output
    }
    chain nat-PREROUTING {
        type nat hook prerouting priority dstnat; policy accept;
        fib daddr type local counter jump nat-prerouting-and-output
    }
    chain nat-POSTROUTING {
        type nat hook postrouting priority srcnat; policy accept;
        oifname != "docker0" ip saddr 172.17.0.0/16 counter masquerade
    }
    chain nat-prerouting-and-output { iifname != "docker0" tcp dport 8099 counter dnat to 172.17.0.2:80; }
    chain raw-PREROUTING {
        type filter hook prerouting priority raw; policy accept;
        ip daddr 172.17.0.2 iifname != "docker0" counter drop
    }
}
"""
#: istio's CNI agent on the node, in ambient mode: probes of kubelet get an address that ztunnel recognises. 10.0.0.9
#: replaces the set of ambient pods.
ISTIO_NODE = """\
*nat
:ISTIO_POSTRT - [0:0]
-A POSTROUTING -j ISTIO_POSTRT
-A ISTIO_POSTRT -d 10.0.0.9/32 -p tcp -m owner --socket-exists -j SNAT --to-source 169.254.7.127
COMMIT
"""


#: What the rules for IPv6 have in place of words of those for IPv4, with the same chains.
_IPV6 = {
    "table ip ": "table ip6 ",
    "rule ip ": "rule ip6 ",
    "ip saddr ": "ip6 saddr ",
    "ip daddr ": "ip6 daddr ",
    "10.0.0.0/8": "fd00:10::/64",
    "10.0.0.9/32": "fd00:10::9/128",
    "172.17.0.0/16": "fd00:17::/64",
    "172.17.0.2:80": "[fd00:17::2]:80",
    "172.17.0.2/32": "fd00:17::2/128",
    "172.17.0.2 ": "fd00:17::2 ",
    "127.0.0.0/8": "::1/128",
    "127.0.0.1/32": "::1/128",
    # istio's addresses of its own.
    "127.0.0.6/32": "::6/128",
    "169.254.7.127": "fd16:9254:7127:1337:ffff:ffff:ffff:ffff",
    "7127:1337:ffff:ffff:ffff:ffff/32": "7127:1337:ffff:ffff:ffff:ffff/128",
}


#: Tailscale's range of addresses, of which its rules for IPv6 say nothing.
_IPV4_ONLY = re.compile(r"^.*(?:-s|saddr) 100\..*\n", re.MULTILINE)


def of_family(family: str, text: str) -> str:
    """Return rules for IPv4 as the same program writes them for a family."""
    if family != "IPv6":
        return text
    text = _IPV4_ONLY.sub("", text)
    for word, other in _IPV6.items():
        text = text.replace(word, other)
    return text


def node_local_dns(address: str, bits: int) -> Neighbour:
    """Return the rules of a DNS cache that listens at an address, at port 5353."""
    address, port = f"{address}/{bits}", 5353
    skip, allow = (
        f'-m comment --comment "NodeLocal DNS Cache: {what}"' for what in ("skip conntrack", "allow DNS traffic")
    )
    matches = [
        (f"-p {kind} -m {kind} --dport {port}", f"-p {kind} -m {kind} --sport {port}") for kind in ("udp", "tcp")
    ]
    raw, accepted = ["*raw"], ["*filter"]
    for to, of in matches:
        raw += [f"-A {chain} -d {address} {to} {skip} -j NOTRACK" for chain in ("PREROUTING", "OUTPUT")]
        raw.append(f"-A OUTPUT -s {address} {of} {skip} -j NOTRACK")
        accepted.append(f"-A INPUT -d {address} {to} {allow} -j ACCEPT")
        accepted.append(f"-A OUTPUT -s {address} {of} {allow} -j ACCEPT")
    return Neighbour("\n".join([*raw, "COMMIT", *accepted, "COMMIT", ""]))


def on_the_node(family: str) -> dict[str, Neighbour]:
    """Return the neighbours on the node for one family, by name."""
    six = family == "IPv6"
    return {
        "calico-iptables": Neighbour(of_family(family, CALICO_IPTABLES)),
        "calico-nftables": Neighbour(nft=of_family(family, CALICO_NFTABLES)),
        "tailscale-iptables": Neighbour(of_family(family, TAILSCALE_IPTABLES)),
        "tailscale-nftables": Neighbour(nft=of_family(family, TAILSCALE_NFTABLES)),
        "docker-nftables": Neighbour(nft=of_family(family, DOCKER_NFTABLES)),
        "istio-node": Neighbour(of_family(family, ISTIO_NODE)),
        # For the cluster IP of the DNS Service.
        "node-local-dns": node_local_dns(*(("fd00:30::53", 128) if six else ("172.30.0.53", 32))),
    }


NAMES_ON_THE_NODE = tuple(on_the_node("IPv4"))

#: Inside a pod with a sidecar, whose Envoy runs as 1337.
ISTIO_SIDECAR = """\
*nat
:ISTIO_INBOUND - [0:0]
:ISTIO_IN_REDIRECT - [0:0]
:ISTIO_OUTPUT - [0:0]
:ISTIO_REDIRECT - [0:0]
-A PREROUTING -p tcp -j ISTIO_INBOUND
-A OUTPUT -p tcp -j ISTIO_OUTPUT
-A ISTIO_INBOUND -p tcp -m tcp --dport 15008 -j RETURN
-A ISTIO_INBOUND -p tcp -m tcp --dport 15090 -j RETURN
-A ISTIO_INBOUND -p tcp -j ISTIO_IN_REDIRECT
-A ISTIO_IN_REDIRECT -p tcp -j REDIRECT --to-ports 15006
-A ISTIO_OUTPUT -s 127.0.0.6/32 -o lo -j RETURN
-A ISTIO_OUTPUT ! -d 127.0.0.1/32 -o lo -p tcp -m owner --uid-owner 1337 -j ISTIO_IN_REDIRECT
-A ISTIO_OUTPUT -m owner --uid-owner 1337 -j RETURN
-A ISTIO_OUTPUT -d 127.0.0.1/32 -j RETURN
-A ISTIO_OUTPUT -j ISTIO_REDIRECT
-A ISTIO_REDIRECT -p tcp -j REDIRECT --to-ports 15001
COMMIT
"""
#: Inside a pod of ambient mode: ztunnel's sockets, in the pod's namespace, have the mark 0x539.
ISTIO_AMBIENT = """\
*mangle
:ISTIO_PRERT - [0:0]
:ISTIO_OUTPUT - [0:0]
-A PREROUTING -j ISTIO_PRERT
-A OUTPUT -j ISTIO_OUTPUT
-A ISTIO_PRERT -m mark --mark 0x539/0xfff -j CONNMARK --set-xmark 0x111/0xfff
-A ISTIO_OUTPUT -m connmark --mark 0x111/0xfff -j CONNMARK --restore-mark --nfmask 0xffffffff --ctmask 0xffffffff
COMMIT
*nat
:ISTIO_PRERT - [0:0]
:ISTIO_OUTPUT - [0:0]
-A OUTPUT -j ISTIO_OUTPUT
-A PREROUTING -j ISTIO_PRERT
-A ISTIO_PRERT -s 169.254.7.127/32 -p tcp -m tcp -j ACCEPT
-A ISTIO_PRERT ! -d 127.0.0.1/32 -p tcp -m tcp ! --dport 15008 -m mark ! --mark 0x539/0xfff -j REDIRECT --to-ports 15006
-A ISTIO_OUTPUT -d 169.254.7.127/32 -p tcp -m tcp -j ACCEPT
-A ISTIO_OUTPUT -p tcp -m mark --mark 0x111/0xfff -j ACCEPT
-A ISTIO_OUTPUT ! -d 127.0.0.1/32 -o lo -j ACCEPT
-A ISTIO_OUTPUT ! -d 127.0.0.1/32 -p tcp -m mark ! --mark 0x539/0xfff -j REDIRECT --to-ports 15001
COMMIT
"""
IN_A_POD: tuple[tuple[str, str], ...] = (("sidecar", ISTIO_SIDECAR), ("ambient", ISTIO_AMBIENT))
