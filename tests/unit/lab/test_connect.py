# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The relay between ssh and a guest ends with ssh, also if the guest no longer answers."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from tests.lab.uml import ROOT

# In this namespace, since a test of units creates none.
_RELAY = (
    "import socket, sys; from tests.lab import connect; "
    "connect.socket_inside = lambda _path, *kind: socket.socket(*kind); "
    "sys.exit(connect.main(['none', '127.0.0.1', sys.argv[1]]))"
)


@pytest.fixture
def relayed():
    """Provide the relay and the guest's end of its connection."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        command = [sys.executable, "-c", _RELAY, str(listening.getsockname()[1])]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT) as relay:
            listening.settimeout(60)
            guest, _address = listening.accept()
            guest.settimeout(60)
            with guest:
                yield relay, guest
            relay.kill()


def test_both_directions_are_relayed(relayed):
    relay, guest = relayed
    relay.stdin.write(b"question")
    relay.stdin.flush()
    assert guest.recv(100) == b"question"
    guest.sendall(b"answer")
    assert relay.stdout.read(6) == b"answer"


def test_the_end_of_the_guest_ends_the_relay(relayed):
    relay, guest = relayed
    guest.sendall(b"last")
    guest.close()
    assert relay.stdout.read() == b"last" and relay.wait(60) == 0


def test_the_end_of_ssh_ends_the_relay_of_a_guest_that_no_longer_answers(relayed):
    relay, guest = relayed
    relay.stdin.write(b"last")
    relay.stdin.close()
    assert relay.wait(60) == 0
    assert guest.recv(100) == b"last" and guest.recv(100) == b""
