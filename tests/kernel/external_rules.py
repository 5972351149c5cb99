# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Rules of other programs in this network namespace: firewalld, ufw, Docker, network plugins and kubelet.

The rules follow what these programs are known to add to a node, including chain names and jump positions.
"""

from __future__ import annotations

import functools
import os
import subprocess
from typing import Optional, Pattern

from tests.lab.system import run

FIREWALLD = """\
table inet firewalld {
    ct helper helper-ftp-tcp { type "ftp" protocol tcp; l3proto inet; };
    chain mangle_PREROUTING { type filter hook prerouting priority -140; policy accept; jump mangle_PREROUTING_ZONES; };
    chain mangle_PREROUTING_ZONES { return; };
    chain nat_PREROUTING { type nat hook prerouting priority -90; policy accept; jump nat_PREROUTING_ZONES; };
    chain nat_PREROUTING_ZONES { return; };
    chain nat_POSTROUTING { type nat hook postrouting priority 110; policy accept; jump nat_POSTROUTING_ZONES; };
    chain nat_POSTROUTING_ZONES { return; };
    chain filter_INPUT {
        type filter hook input priority 10; policy accept;
        ct state { established, related } accept
        ct status dnat accept
        iifname "lo" accept
        jump filter_INPUT_ZONES
        ct state invalid drop
    };
    chain filter_FORWARD {
        type filter hook forward priority 10; policy accept;
        ct state { established, related } accept
        ct status dnat accept
        jump filter_FORWARD_ZONES
    };
    chain filter_INPUT_ZONES { tcp dport 9999 reject with icmpx admin-prohibited; return; };
    chain filter_FORWARD_ZONES { return; };
}
"""

#: By table: input for ``iptables-restore --noflush``. Docker inserts its jumps at the head of the built-in chains.
DOCKER = """\
*nat
:DOCKER - [0:0]
-I PREROUTING -m addrtype --dst-type LOCAL -j DOCKER
-I OUTPUT ! -d 127.0.0.0/8 -m addrtype --dst-type LOCAL -j DOCKER
-I POSTROUTING -s 172.17.0.0/16 ! -o docker0 -j MASQUERADE
-A DOCKER -i docker0 -j RETURN
-A DOCKER ! -i docker0 -p tcp -m tcp --dport 8099 -j DNAT --to-destination 172.17.0.2:80
COMMIT
*filter
:DOCKER - [0:0]
:DOCKER-USER - [0:0]
:DOCKER-ISOLATION-STAGE-1 - [0:0]
-I FORWARD -o docker0 -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
-I FORWARD -j DOCKER-ISOLATION-STAGE-1
-I FORWARD -j DOCKER-USER
-A DOCKER -d 172.17.0.2/32 ! -i docker0 -o docker0 -p tcp -m tcp --dport 80 -j ACCEPT
-A DOCKER-ISOLATION-STAGE-1 -j RETURN
-A DOCKER-USER -j RETURN
COMMIT
"""

#: The chains that the portmap plugin and flannel insert at the head.
NETWORK_PLUGIN = """\
*nat
:CNI-HOSTPORT-DNAT - [0:0]
:CNI-HOSTPORT-SETMARK - [0:0]
:CNI-HOSTPORT-MASQ - [0:0]
:CNI-DN-0123456789abcdef - [0:0]
:FLANNEL-POSTRTG - [0:0]
-I PREROUTING -m addrtype --dst-type LOCAL -j CNI-HOSTPORT-DNAT
-I OUTPUT -m addrtype --dst-type LOCAL -j CNI-HOSTPORT-DNAT
-I POSTROUTING -m comment --comment "CNI portfwd requiring masquerade" -j CNI-HOSTPORT-MASQ
-I POSTROUTING -m comment --comment "flanneld masq" -j FLANNEL-POSTRTG
-A CNI-HOSTPORT-SETMARK -m comment --comment "CNI portfwd masquerade mark" -j MARK --set-xmark 0x2000/0x2000
-A CNI-HOSTPORT-MASQ -m mark --mark 0x2000/0x2000 -j MASQUERADE
-A CNI-HOSTPORT-DNAT -p tcp -m comment --comment "dnat id: \\"0a1b\\"" -m tcp --dport 8098 -j CNI-DN-0123456789abcdef
-A CNI-DN-0123456789abcdef -p tcp -m tcp --dport 8098 -j DNAT --to-destination 10.244.9.9:80
-A FLANNEL-POSTRTG -m mark --mark 0x4000/0x4000 -m comment --comment "flanneld masq" -j RETURN
COMMIT
*filter
:FLANNEL-FWD - [0:0]
-A FORWARD -m comment --comment "flanneld forward" -j FLANNEL-FWD
-A FLANNEL-FWD -s 10.244.0.0/16 -m comment --comment "flanneld forward" -j ACCEPT
-A FLANNEL-FWD -d 10.244.0.0/16 -m comment --comment "flanneld forward" -j ACCEPT
COMMIT
"""

UFW = """\
*filter
:ufw-before-input - [0:0]
:ufw-before-forward - [0:0]
:ufw-user-input - [0:0]
:ufw-user-forward - [0:0]
-A INPUT -j ufw-before-input
-A FORWARD -j ufw-before-forward
-A ufw-before-input -i lo -j ACCEPT
-A ufw-before-input -j ufw-user-input
-A ufw-before-forward -j ufw-user-forward
-A ufw-user-input -p tcp -m tcp --dport 22 -m comment --comment "dapp_OpenSSH" -j ACCEPT
COMMIT
"""

#: kubelet's own rules; without KUBE-FIREWALL in tests where the service proxy must create that chain.
_MARTIANS = (
    '! -s 127.0.0.0/8 -d 127.0.0.0/8 -m comment --comment "block incoming localnet connections" '
    "-m conntrack ! --ctstate RELATED,ESTABLISHED,DNAT -j DROP"
)
KUBELET = f"""\
*mangle
:KUBE-IPTABLES-HINT - [0:0]
:KUBE-KUBELET-CANARY - [0:0]
COMMIT
*nat
:KUBE-KUBELET-CANARY - [0:0]
COMMIT
*filter
:KUBE-KUBELET-CANARY - [0:0]
:KUBE-FIREWALL - [0:0]
-I OUTPUT -j KUBE-FIREWALL
-I INPUT -j KUBE-FIREWALL
-A KUBE-FIREWALL {_MARTIANS}
COMMIT
"""


def restore(variant: str, text: str, program: str = "iptables") -> None:
    """Add rules to the existing ones, in one variant of iptables."""
    run([f"{program}-{variant}-restore", "--noflush"], stdin=text)


def of_ipv6(text: str) -> str:
    """Return the rules for ip6tables, without those that contain an IPv4 address."""
    return "".join(line for line in text.splitlines(keepends=True) if not any(mark in line for mark in (".0.", "244.")))


@functools.cache
def has_nftables() -> bool:
    """Return whether nf_tables supports NAT for IPv4; the user-mode Linux kernel has it only for the family inet."""
    sample = "table ip probe { chain probe { type nat hook output priority 0; }; }"
    return subprocess.run(["nft", "--check", sample], capture_output=True, check=False).returncode == 0


def variants() -> list[str]:
    """Return the variants of iptables that the kernel supports."""
    return ["legacy", "nft"] if has_nftables() else ["legacy"]


def parameters(skipped: Pattern[str], wanted: Optional[Pattern[str]] = None) -> dict[str, str]:
    """Return the values of the kernel parameters of networking, by path.

    The patterns are searched in the name and in the path; parameters that cannot be read are not returned.
    """
    found = {}
    for directory, _directories, names in os.walk("/proc/sys/net"):
        for name in names:
            path = os.path.join(directory, name)
            if not skipped.search(name) and (wanted is None or wanted.search(path)):
                try:
                    with open(path, encoding="utf-8", errors="replace") as stream:
                        found[path] = stream.read()
                except OSError:
                    continue  # some parameters are write-only
    return found


def add(variant: str, *texts: str) -> None:
    """Add rules in both families of one variant, and firewalld's table where the kernel supports it."""
    for text in texts:
        restore(variant, text)
        restore(variant, of_ipv6(text), "ip6tables")
    if has_nftables():
        run(["nft", "-f", "-"], stdin=FIREWALLD)
