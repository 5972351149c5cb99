# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The node's token: renewed at half its lifetime, over days of an injected clock, and after failures."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import stat
import threading

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.agent.api.access import ApiClients, TokenKeeper
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.api.servers import ApiServers
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.telemetry.log import Log
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.telemetry.metrics import Metrics
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.threads.supervision import Supervisor
from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import ApiError, ConfigurationError
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.api.access import token_file
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.api.access.service_token import parse_token
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.api.access.token_file import (
    read_token,
    store_token,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.api.access.token_renewal import (
    CHECK_SECONDS,
    PAUSE_SECONDS,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.api.errors import ApiStatusError
from ansible_collections.kubenode.proxy.plugins.module_utils.controller import service_account
from tests.apiserver.accounts import Accounts, claims_of, sign
from tests.apiserver.server import ApiServer
from tests.apiserver.store import Store
from tests.apiserver.tls import make_certificates, write_kubeconfig

WHO = service_account.Account("kube-system", "kubenode-proxy")
DAY = 86_400


class Server:
    """An API server with a manual clock that can be down and can give invalid answers."""

    def __init__(self):
        self.now = 1_800_000_000.0
        self.nodes = {"n1": "u1"}
        self.accounts = Accounts(lambda name: self.nodes.get(name, ""), lambda: self.now)
        self.away = False
        self.answers = []
        service_account.ensure(self, WHO)

    def send(self, method, path, body, purpose):
        code, answer = self.accounts.answer(method, path, body)
        if code >= 300:
            raise ApiStatusError(f"{purpose}: {answer['message']}", code, answer.get("reason", ""))
        return answer

    def close(self):
        pass


class Client:
    """A client of the only server, which sends the token of the file, as the agent's does."""

    def __init__(self, server, path):
        self._server, self._token = server, read_token(path)

    def post(self, path, body, purpose):
        if self._server.away:
            raise ApiError(f"{purpose}: timed out while connecting")
        if self._server.answers:
            return self._server.answers.pop(0)
        who = self._server.accounts.review(self._token)
        if not who or not self._server.accounts.allowed(who, "POST", path):
            raise ApiStatusError(f"{purpose}: the credentials are not accepted (401 Unauthorized)", 401)
        return self._server.send("POST", path, body, purpose)

    def report(self, _error):
        return False

    def close(self):
        pass


@pytest.fixture
def server():
    return Server()


@pytest.fixture
def path(tmp_path, server):
    answer = server.send(
        "POST",
        "/api/v1/namespaces/kube-system/serviceaccounts/kubenode-proxy/token",
        {"spec": {"expirationSeconds": DAY, "boundObjectRef": {"kind": "Node", "name": "n1", "uid": "u1"}}},
        "token",
    )
    store_token(str(tmp_path / "token"), answer["status"]["token"])
    server.accounts.requests.clear()
    return str(tmp_path / "token")


@pytest.fixture
def log():
    return io.StringIO()


@pytest.fixture
def keeper(path, server, log):
    return TokenKeeper(path, lambda _expect: Client(server, path), Log(log), lambda: server.now)


def run(keeper, server, seconds):
    """Run the keeper's steps until that time has passed."""
    end = server.now + seconds
    while server.now < end:
        server.now += min(keeper.step(), end - server.now)


def test_over_a_month_the_token_is_renewed_each_half_day_and_always_valid(keeper, server, path, log):
    for _hour in range(30 * 24):
        run(keeper, server, 3600.0)
        assert server.accounts.review(read_token(path))
    assert 59 <= len(server.accounts.requests) <= 61
    said = parse_token(read_token(path))
    assert (said.lifetime, said.node, said.node_uid) == (DAY, "n1", "u1")
    assert "level=warning" not in log.getvalue()
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert os.listdir(os.path.dirname(path)) == ["token"]


def test_an_outage_of_less_than_half_a_lifetime_costs_only_a_log_line(keeper, server, path, log):
    server.away = True
    run(keeper, server, 0.9 * DAY)
    assert log.getvalue().count("the token for the API server cannot be renewed") == 1
    assert "it expires at" in log.getvalue() and "the programmed rules are kept" in log.getvalue()
    server.away = False
    run(keeper, server, 2 * PAUSE_SECONDS)
    assert server.accounts.review(read_token(path)) and "was renewed" in log.getvalue()


def test_a_token_that_cannot_be_stored_is_kept_and_not_requested_again(keeper, server, path, log, monkeypatch):
    """While the disk is full, or read-only, each step only tries to write it."""
    write = token_file.write_whole

    def refuse(*_given):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(token_file, "write_whole", refuse)
    before = read_token(path)
    run(keeper, server, 0.75 * DAY)
    assert len(server.accounts.requests) == 1 and read_token(path) == before
    assert log.getvalue().count("Read-only file system") == 1
    monkeypatch.setattr(token_file, "write_whole", write)
    run(keeper, server, 2 * PAUSE_SECONDS)
    assert len(server.accounts.requests) == 1 and read_token(path) != before
    assert server.accounts.review(read_token(path)) and "was renewed" in log.getvalue()


def test_another_api_server_is_asked_after_one_that_fails(tmp_path, server, path, log):
    """Over HTTPS, while no other thread has noticed that the server in use refuses connections."""
    certificates = make_certificates(tmp_path / "tls")
    good, dead = (ApiServer(Store(), certificates) for _number in range(2))
    dead.close()
    good.accounts = server.accounts
    with contextlib.closing(good):
        kubeconfig = write_kubeconfig(tmp_path / "kubeconfig", dead.url, certificates.authority, read_token(path))
        servers = ApiServers(Log(log), choose=lambda candidates: candidates[0])
        servers.configure([("127.0.0.1", int(good.url.rpartition(":")[2]))], True)
        clients = ApiClients(servers, lambda: str(kubeconfig), Metrics(), Log(log))
        keeper = TokenKeeper(path, clients.connect, Log(log), lambda: server.now)
        before = read_token(path)
        server.now += 0.6 * DAY
        assert keeper.step() == PAUSE_SECONDS and read_token(path) == before
        server.now += PAUSE_SECONDS
        assert keeper.step() == PAUSE_SECONDS and read_token(path) != before
    assert server.accounts.review(read_token(path))
    assert [item["server"] for item in servers.status() if item["inUse"]] == [good.url]


def test_a_replaced_token_file_is_read_after_expiry(keeper, server, path, log):
    server.away = True
    run(keeper, server, 2 * DAY)
    server.away = False
    run(keeper, server, DAY)
    assert not server.accounts.review(read_token(path))
    assert "it has expired at" in log.getvalue() and "run the role agent again" in log.getvalue()
    # Each reason once: down before the expiry, down after it, and refused.
    assert log.getvalue().count("level=warning") == 3
    place = f"/api/v1/namespaces/{WHO.namespace}/serviceaccounts/{WHO.name}/token"
    other = server.send("POST", place, {"spec": {"expirationSeconds": DAY}}, "token")["status"]["token"]
    store_token(path, other)
    run(keeper, server, 3 * DAY)
    assert server.accounts.review(read_token(path))


def test_a_token_without_expiry_and_no_token_are_left_alone(tmp_path, server, log):
    secret = service_account.ensure(server, WHO, shared=True).token
    path = str(tmp_path / "token")
    keeper = TokenKeeper(path, lambda _expect: pytest.fail("asks the server"), Log(log), lambda: server.now)
    assert keeper.step() == CHECK_SECONDS
    store_token(path, secret)
    assert keeper.step() == CHECK_SECONDS and read_token(path) == secret and log.getvalue() == ""


def test_a_node_whose_clock_is_behind_keeps_a_valid_token(path, server, log):
    keeper = TokenKeeper(path, lambda _expect: Client(server, path), Log(log), lambda: server.now - 10 * DAY)
    keeper._monotonic = lambda: server.now
    end = server.now + 5 * DAY
    while server.now < end:
        server.now += keeper.step()
        assert server.accounts.review(read_token(path))


def test_a_wrong_clock_causes_at_most_one_request_a_minute(keeper, server, path):
    keeper._clock = lambda: server.now + 10 * DAY
    run(keeper, server, 3600.0)
    assert len(server.accounts.requests) <= 60
    assert server.accounts.review(read_token(path))


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"status": None},
        {"status": {"token": 5}},
        {"status": {"token": ""}},
        {"status": {"token": "a.b.c"}},
        {"status": {"token": sign({"sub": "system:serviceaccount:a:b", "exp": 1e400})}},
        {"status": {"token": sign({"sub": "system:serviceaccount:a:b", "exp": 1})}},
        {"status": {"token": sign({"sub": ["x"]})}},
        {"status": {"token": "x." + "[" * 9 + ".y"}},
        {"status": []},
    ],
)
def test_an_answer_without_a_better_token_keeps_the_old_one(keeper, server, path, log, answer):
    before = read_token(path)
    server.now += 0.6 * DAY
    server.answers.append(answer)
    assert keeper.step() == PAUSE_SECONDS
    assert read_token(path) == before and log.getvalue().count("\n") == 1
    assert before not in log.getvalue()
    assert keeper.step() == PAUSE_SECONDS and read_token(path) != before


def test_the_supervised_thread_renews_and_ends(server, path, log):
    """The supervisor aborts a request that hangs."""
    before = read_token(path)
    server.now += 0.6 * DAY
    hung, broken_off = threading.Event(), threading.Event()

    class Hanging:
        def post(self, *_arguments):
            hung.set()
            assert broken_off.wait(20)
            raise ApiError("broken off")

        def report(self, _error):
            return False

        def interrupt(self):
            broken_off.set()

        def close(self):
            pass

    clients = [Hanging()]
    keeper = TokenKeeper(
        path, lambda _expect: clients.pop() if clients else Client(server, path), Log(log), lambda: server.now
    )
    task = Supervisor(Log(log)).start("token", keeper.run, keeper.interrupt)
    assert hung.wait(20)
    assert task.deadline is not None
    task.interrupt()
    keeper.stop()
    task.join(20)
    assert not task.alive and read_token(path) == before and "broken off" in log.getvalue()
    keeper.interrupt()


def test_only_tokens_of_service_accounts_are_stored(tmp_path):
    path = str(tmp_path / "token")
    for text in ("", "x", "a.b.c", "a.e30.c", sign({"sub": "system:node:x"}), sign({"sub": "system:serviceaccount:x"})):
        with pytest.raises(ConfigurationError, match="not a ServiceAccount token") as caught:
            store_token(path, text)
        assert not text or text not in str(caught.value)
    good = sign({"sub": "system:serviceaccount:a:b"})
    assert claims_of(good) and claims_of(good + "x") is None
    assert store_token(path, good) and not store_token(path, good)
    if not os.geteuid():
        os.chown(tmp_path, 65534, 65534)
        assert store_token(path, sign({"sub": "system:serviceaccount:a:c"}))
        assert os.stat(path).st_uid == 65534
    with pytest.raises(ConfigurationError, match="cannot be written"):
        store_token(str(tmp_path / "nowhere" / "token"), good)
