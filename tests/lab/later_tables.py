# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The tables of kube-proxy 1.37 and 1.38 in nftables mode: by reading, from what 1.36 was recorded to write.

No kube-proxy of these versions was run. What they write differently was read in their source: one endpoint is a plain
``dnat``, and node ports on loopback addresses are rejected (gate ``KubeProxyNFTablesLocalhostNodePorts``, in effect
since 1.38) and counted by named counters, the first stateful objects in the table.
"""

from __future__ import annotations

import re

PROTOCOLS = ("tcp", "udp", "sctp")
_LOOPBACK = {"ip": "127.0.0.0/8", "ip6": "::1"}
_TABLE = re.compile(r"^table (ip6?) kube-proxy \{\n(.*?)^\}\n", re.MULTILINE | re.DOTALL)
_ONE_ENDPOINT = re.compile(r"dnat ip6? to numgen random mod 1 map \{ 0 : (\S+) \. (\d+) \}")
_NODE_PORT = re.compile(r"\b(tcp|udp|sctp) \. (\d+)(?: comment \"[^\"]*\")? : goto")
_NODE_PORT_MAPS = re.compile(
    r"^\tmap (?:service-nodeports|no-endpoint-nodeports) \{\n(.*?)^\t\}", re.MULTILINE | re.DOTALL
)
_CHECK = re.compile(r"^\tchain nodeport-endpoints-check \{\n", re.MULTILINE)


def as_1_38(text: str) -> str:
    """Return tables of kube-proxy 1.36, as nft lists them, as 1.38 would have written them; other text stays."""
    return _TABLE.sub(lambda found: _table(found[1], found[2]), text)


def _table(family: str, body: str) -> str:
    body = _ONE_ENDPOINT.sub(lambda found: f"dnat to {_bracketed(found[1])}:{found[2]}", body)
    maps = "".join(_NODE_PORT_MAPS.findall(body))
    elements = [
        f"{protocol} . {port} : goto localhost-nodeport-reject-{protocol}"
        for protocol, port in sorted(set(_NODE_PORT.findall(maps)))
    ]
    rule = f"{family} daddr {_LOOPBACK[family]} meta l4proto . th dport vmap @localhost-nodeport-reject-ports"
    before, check, after = body.partition(_CHECK.search(body)[0])  # type: ignore[index]
    own, end, rest = after.partition("\t}\n")
    added = "".join(_rejections(elements))
    return f"table {family} kube-proxy {{\n{added}{before}{check}{own}\t\t{rule}\n{end}{rest}}}\n"


def _rejections(elements: list[str]) -> list[str]:
    lines = []
    for protocol in PROTOCOLS:
        counter = f"localhost-nodeport-rejected-{protocol}"
        lines.append(f"\tcounter {counter} {{\n\t\tpackets 0 bytes 0\n\t}}\n")
        rule = f'counter name "{counter}" reject'
        lines.append(f"\tchain localhost-nodeport-reject-{protocol} {{\n\t\t{rule}\n\t}}\n")
    listed = f"\t\telements = {{ {', '.join(elements)} }}\n" if elements else ""
    typed = "\t\ttype inet_proto . inet_service : verdict\n"
    return [*lines, f"\tmap localhost-nodeport-reject-ports {{\n{typed}{listed}\t}}\n"]


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address
