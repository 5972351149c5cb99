# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Token files and exec plugins over hours of a manual clock."""

from __future__ import annotations

import json
import subprocess

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import ApiError
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.api.access.credentials import TokenFile
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.api.access.exec_plugin import (
    ExecPlugin,
    ExecSettings,
)
from tests.lab.clock import Clock

EXEC_VERSION = "client.authentication.k8s.io/v1"


def authorization(credentials):
    return dict(credentials.headers())["Authorization"]


def test_a_token_file_is_read_again_each_minute_over_hours(tmp_path):
    path, clock = tmp_path / "token", Clock(1_800_000_000.0)
    path.write_text("token-0")
    credentials = TokenFile(str(path), clock=clock)
    seen = set()
    for minute in range(6 * 60):
        path.write_text(f"token-{minute // 30}\n")
        clock.now += 60
        assert authorization(credentials) == f"Bearer token-{minute // 30}"
        seen.add(authorization(credentials))
    assert len(seen) == 12


def test_a_token_file_is_read_at_once_after_401_and_the_last_token_outlives_it(tmp_path):
    path, clock = tmp_path / "token", Clock(1_800_000_000.0)
    path.write_text("first")
    credentials = TokenFile(str(path), clock=clock)
    assert authorization(credentials) == "Bearer first"
    path.write_text("second")
    assert authorization(credentials) == "Bearer first"
    credentials.rejected()
    assert authorization(credentials) == "Bearer second"
    path.unlink()
    clock.now += 3600
    assert authorization(credentials) == "Bearer second"


def plugin(clock, answers, **settings):
    """Return an exec plugin that gives the answers in turn, repeating the last one, and the times of its runs."""
    runs = []

    def run(words, **options):
        runs.append(clock.now)
        answer = answers[min(len(runs), len(answers)) - 1]
        status = answer() if callable(answer) else answer
        if isinstance(status, subprocess.CompletedProcess):
            return status
        output = {"kind": "ExecCredential", "apiVersion": EXEC_VERSION, "status": status}
        return subprocess.CompletedProcess(words, 0, json.dumps(output).encode(), b"")

    return ExecPlugin(ExecSettings(EXEC_VERSION, "plugin", **settings), now=clock, run=run), runs


def stamp(seconds):
    return subprocess.run(
        ["date", "-u", "-d", f"@{seconds:.0f}", "+%Y-%m-%dT%H:%M:%SZ"], capture_output=True, text=True, check=True
    ).stdout.strip()


def test_a_plugin_runs_once_per_lifetime_of_its_token():
    clock = Clock(1_800_000_000.0)
    begin = clock.now
    credentials, runs = plugin(
        clock, [lambda: {"token": f"t{clock.now:.0f}", "expirationTimestamp": stamp(clock.now + 3600)}]
    )
    for _request in range(12 * 60):
        assert authorization(credentials).startswith("Bearer t")
        clock.now += 60
    assert runs == [begin + 3600 * hour for hour in range(12)]


def test_a_token_that_lives_20_seconds_does_not_run_the_plugin_for_each_request():
    clock = Clock(1_800_000_000.0)
    credentials, runs = plugin(clock, [lambda: {"token": "t", "expirationTimestamp": stamp(clock.now + 20)}])
    for _request in range(100):
        credentials.headers()
        clock.now += 0.1
    assert len(runs) == 1


def test_a_plugin_without_expiry_runs_again_only_after_401():
    clock = Clock(1_800_000_000.0)
    credentials, runs = plugin(clock, [{"token": "a"}, {"token": "b"}])
    for _hour in range(48):
        assert authorization(credentials) == "Bearer a"
        clock.now += 3600
    credentials.rejected()
    assert authorization(credentials) == "Bearer b" and len(runs) == 2


def test_a_plugin_that_fails_temporarily_is_run_again():
    clock = Clock(1_800_000_000.0)
    failed = subprocess.CompletedProcess([], 3, b"", b"no network\n")
    credentials, _runs = plugin(clock, [failed, failed, {"token": "t"}])
    for _attempt in range(2):
        with pytest.raises(ApiError, match="exec plugin plugin: exited with status 3: no network"):
            credentials.headers()
    assert authorization(credentials) == "Bearer t"


def test_a_plugin_can_give_a_certificate():
    credentials, _runs = plugin(Clock(1_800_000_000.0), [{"clientCertificateData": "C", "clientKeyData": "K"}])
    assert credentials.headers() == []
    assert credentials.certificate()[:2] == (b"C", b"K")


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        (b"", "not JSON"),
        (b"[" * 100000, "not JSON"),
        (b"[]", "not an ExecCredential"),
        (b'{"kind":"ExecCredential","apiVersion":"x"}', "not of version"),
        (f'{{"kind":"ExecCredential","apiVersion":"{EXEC_VERSION}"}}'.encode(), "no status"),
        (f'{{"kind":"ExecCredential","apiVersion":"{EXEC_VERSION}","status":{{}}}}'.encode(), "neither a token nor"),
    ],
)
def test_invalid_credentials_give_one_line_errors(output, reason):
    credentials, _runs = plugin(Clock(1_800_000_000.0), [subprocess.CompletedProcess([], 0, output, b"")])
    with pytest.raises(ApiError, match=reason) as caught:
        credentials.headers()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("expiry", [5, "soon", "2027-99-01T00:00:00Z", "9999-12-31T23:59:59.999999999"])
def test_an_invalid_expiry_is_refused(expiry):
    credentials, _runs = plugin(Clock(1_800_000_000.0), [{"token": "t", "expirationTimestamp": expiry}])
    with pytest.raises(ApiError, match="expirationTimestamp is not an RFC 3339 time"):
        credentials.headers()
