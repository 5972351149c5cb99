# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Errors that ipvs_services reports before it contacts the kernel; the guest tests cover the rest."""

from __future__ import annotations

from tests.modules.harness import UNPRIVILEGED

MODULE = "kubenode.proxy.ipvs_services"
INFO = "kubenode.proxy.ipvs_services_info"
WEB = {"address": "192.0.2.10", "port": 80, "real_servers": [{"address": "10.0.0.1"}]}


def test_errors_are_one_clear_line(node):
    found = node.play(
        {MODULE: {}},
        {MODULE: {"services": [dict(WEB, port=99999)]}},
        {MODULE: {"services": [WEB, WEB]}},
        {MODULE: {"services": [dict(WEB, address="web.example")]}},
        {MODULE: {"services": [dict(WEB, real_servers=[{"address": "10.0.0.1", "port": 81, "forwarding": "dr"}])]}},
        {MODULE: {"services": [dict(WEB, protocol="icmp")]}},
        {MODULE: {"purge": ["192.0.2.0/24"]}},
        {MODULE: {"services": [WEB]}, **UNPRIVILEGED},
        {
            MODULE: {
                "services": [dict(WEB, real_servers=[{"address": "10.0.0.1", "state": "absent"}])],
                "state": "absent",
            }
        },
        {MODULE: {"timeouts": {"tcp": 0}}},
        {INFO: {"address": "web.example"}},
        {INFO: {"address": "192.0.2.10", "firewall_mark": 1}},
        {INFO: {}, **UNPRIVILEGED},
    )
    expected = [
        "services, purge, timeouts and save are all empty",
        "services[0].port: 99999 is not between 0 and 65535",
        "services[1]: virtual server 192.0.2.10:80/TCP is given twice",
        "services[0].address: 'web.example' is not an IP address",
        "services[0].real_servers[0].port: 81 differs from the virtual server's 80",
        "icmp",
        "purge[0].address: '192.0.2.0/24' is not an IP address",
        "needs root",
        "state: absent removes whole virtual servers",
        "timeouts.tcp: 0 is not between 1 and",
        "address: 'web.example' is not an IP address",
        "parameters are mutually exclusive: firewall_mark|address",
        "needs root",
    ]
    for result, words in zip(found, expected):
        assert result["failed"] and words in result["msg"] and "\n" not in result["msg"], (words, result["msg"])
