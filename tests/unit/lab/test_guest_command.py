# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Test the command lines of guests and the batches of ip(8), without a guest and without root."""

from __future__ import annotations

import argparse

import pytest

from tests.lab import qemu, system, uml
from tests.lab.guest_command import Guest, make_parser, run_parsed, settings
from tests.lab.system import LabError, ip_batch

OPTIONS = ["--memory", "2G", "--modules", "a,b", "--writable", "/x", "--writable", "/y", "--env", "K=V=W"]


@pytest.fixture
def calls(monkeypatch):
    """Return the calls of the functions that boot a guest, none of which does."""
    found = []

    def run(argv, guest, **more):
        found.append((argv, guest, more))
        return 7

    monkeypatch.setattr(uml, "run_in_uml", run)
    monkeypatch.setattr(qemu, "run_in_qemu", run)
    monkeypatch.setattr(qemu, "system_of", lambda release: f"Debian {release}")
    return found


def test_options_become_arguments_of_the_guest(calls):
    assert uml.main(["--", "ls", "-l"]) == 7
    assert qemu.main([*OPTIONS, "--debian", "13", "--", "ls"]) == 7
    chosen = Guest(memory="2G", modules=["a", "b"], writable=["/x", "/y"], environment={"K": "V=W"})
    assert calls == [
        (["ls", "-l"], Guest(writable=[]), {}),
        (["ls"], chosen, {"system": "Debian 13"}),
    ]


def test_without_a_command_an_emulated_guest_is_only_made(calls):
    assert qemu.main([]) == 0
    assert calls == []


def test_no_modules_are_an_empty_list():
    assert settings(make_parser("p", "d").parse_args(["--modules", ""])).modules == []


def test_an_error_of_the_laboratory_is_one_line(capsys):
    def fail(_options: argparse.Namespace) -> int:
        raise LabError("linux.uml is not installed")

    assert run_parsed(make_parser("p", "d"), [], fail) == 2
    assert capsys.readouterr().err == "error: linux.uml is not installed\n"


def test_a_batch_is_one_process_and_one_more_for_ipv6_rules(monkeypatch):
    found = []
    monkeypatch.setattr(system, "run", lambda argv, stdin: found.append((argv, stdin)))
    ip_batch(["addr add fd00::1/64 dev a", "-6 rule add iif a lookup 9", "route add 10.0.0.0/8 dev a"], "space")
    ip_batch(["link set lo up"])
    ip_batch([])
    assert found == [
        (["ip", "-n", "space", "-batch", "-"], "addr add fd00::1/64 dev a\nroute add 10.0.0.0/8 dev a\n"),
        (["ip", "-6", "-n", "space", "-batch", "-"], "rule add iif a lookup 9\n"),
        (["ip", "-batch", "-"], "link set lo up\n"),
    ]
