# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Faults of the agent's HTTP server: after each of them every port is served again."""

from __future__ import annotations

import errno
import io
import os
import socket
import sys
import threading

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.agent.http.connections import raise_open_files
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.http.server import HttpServer
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.telemetry.log import LimitedLog, Log
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.threads.supervision import (
    GRACE_SECONDS,
    STUCK_SECONDS,
    Supervisor,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.base.loop import LONGEST_WAIT_SECONDS
from ansible_collections.kubenode.proxy.plugins.module_utils.clients import ClientRule
from tests.unit.agent.http_bench import GET, HERE, answers, ask, connect, read_all, respond, running, supervisor
from tests.waiting import PATIENCE, wait_for


@pytest.fixture(autouse=True)
def enough_files():
    assert raise_open_files() >= 16384


def test_it_continues_after_running_out_of_file_descriptors(monkeypatch):
    with running() as found:
        failures = iter([errno.EMFILE, errno.ENFILE, errno.ENOMEM])
        accept = socket.socket.accept

        def failing(sock):
            number = next(failures, None)
            if number is not None:
                raise OSError(number, os.strerror(number))
            return accept(sock)

        monkeypatch.setattr(socket.socket, "accept", failing)
        assert ask(found.port).endswith(b"GET /healthz")
        assert "no connection can be accepted" in found.log.getvalue()


def test_faults_of_a_responder_are_logged_once_with_their_traceback():
    with running() as found:
        for _round in range(50):
            assert ask(found.port, b"GET /broken HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 500 ")
        text = found.log.getvalue()
        assert text.count("Traceback") == 1 and "in respond" in text
        assert ask(found.port).endswith(b"GET /healthz")


@pytest.mark.parametrize("place", ["_expire", "_accept", "_choose_to_accept"])
@pytest.mark.parametrize("fault", [RuntimeError, MemoryError, OSError, RecursionError])
def test_after_any_exception_every_port_is_served_again(monkeypatch, place, fault):
    with running() as found:
        second = found.server.open(HERE, 0, respond)
        with connect(found.port) as idle:
            wait_for(lambda: found.server.connections == 1)
            failed, original = threading.Event(), getattr(found.server, place)

            def failing(*arguments):
                if not failed.is_set():
                    failed.set()
                    raise fault("a fault of the server")
                return original(*arguments)

            monkeypatch.setattr(found.server, place, failing)
            # A port that is opened while the thread is down is served as well.
            third = found.server.open(HERE, 0, respond)
            # The server may still be accepting when it is patched, and accept the next connection unpatched.
            wait_for(lambda: connect(found.port).close() or failed.is_set())
            assert read_all(idle) == b"", "the connection may have been the cause"
        for port in (found.port, second.port, third.port):
            wait_for(lambda port=port: answers(port))
        text = found.log.getvalue()
        assert text.count("a thread has failed") == 1 and "a fault of the server" in text and " failing" in text


def test_a_thread_that_dies_is_started_again(monkeypatch):
    monkeypatch.setattr(threading, "excepthook", lambda _arguments: None)
    stream = io.StringIO()
    watch = supervisor(stream)
    server = HttpServer(watch, LimitedLog(Log(stream)), ClientRule())
    try:
        port = server.open(HERE, 0, respond).port
        with monkeypatch.context() as patch:
            patch.setattr(server, "_expire", lambda: sys.exit("outside of all handlers"))
            connect(port).close()
            wait_for(lambda: not server._task.alive)
        watch.check()
        assert "a thread has died and is restarted" in stream.getvalue()
        wait_for(lambda: answers(port))
    finally:
        server.stop()


def test_a_thread_that_cannot_be_started_is_started_later(monkeypatch):
    stream = io.StringIO()
    watch = supervisor(stream)
    server = HttpServer(watch, LimitedLog(Log(stream)), ClientRule())

    def refuse(_thread):
        raise RuntimeError("can't start new thread")

    try:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            port = server.open(HERE, 0, respond).port
        watch.check()
        wait_for(lambda: answers(port))
    finally:
        server.stop()


def test_a_stuck_thread_is_noticed():
    now = [1000.0]
    held = threading.Event()
    stream = io.StringIO()
    watch = Supervisor(Log(stream), clock=lambda: now[0])
    server = HttpServer(watch, LimitedLog(Log(stream)), ClientRule())

    def hold(_request):
        held.wait(PATIENCE)

    port = server.open(HERE, 0, hold)
    with connect(port.port) as sock:
        sock.sendall(GET)
        wait_for(lambda: server.connections == 1)
        assert watch.check() == ()
        now[0] += 2 * LONGEST_WAIT_SECONDS + GRACE_SECONDS
        assert watch.check() == (), "it is interrupted first"
        now[0] += GRACE_SECONDS + STUCK_SECONDS
        assert watch.check() == ("http",)
        held.set()
        read_all(sock)
    wait_for(lambda: watch.check() == ())
    server.stop()
