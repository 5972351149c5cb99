# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The protocol of the lab's echo servers and probes, over real sockets on the loopback device."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Iterator

import pytest

from tests.lab import wire
from tests.lab.background import Background
from tests.lab.ports import free_port
from tests.lab.probe import ask

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def port(tmp_path: Path) -> Iterator[int]:
    number = free_port()
    pods = [{"name": "pod-a", "namespace": None, "ports": [["TCP", number], ["UDP", number]]}]
    configuration = tmp_path / "echo.json"
    configuration.write_text(json.dumps(pods), encoding="ascii")
    argv = [sys.executable, "-m", "tests.lab.echo", str(configuration)]
    with Background(argv, cwd=str(ROOT)):
        yield number


@pytest.mark.parametrize("protocol", ["TCP", "UDP"])
def test_the_answer_names_the_backend_and_the_peer(port: int, protocol: str) -> None:
    answer = ask(protocol, "127.0.0.1", port, source="127.0.0.9")
    assert (answer.outcome, answer.backend, answer.peer) == ("answer", "pod-a", "127.0.0.9")


def test_a_closed_port_is_refused() -> None:
    assert ask("TCP", "127.0.0.1", free_port()).outcome == "refused"


def test_dns_message_carries_the_text_and_repeats_number_and_question() -> None:
    query = wire.dns_query(0x1234)
    response = wire.dns_response(query, "pod-a 10.0.0.1")
    assert response[:2] == b"\x12\x34"
    assert query[12:] in response
    assert wire.dns_text(response) == "pod-a 10.0.0.1"
