# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""kubelet leaves an address: its file is restored, and the record stays as long as the running kubelet uses it."""

from __future__ import annotations

import json
import time

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import ApiError
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.api.access.certificate import Place
from ansible_collections.kubenode.proxy.plugins.module_utils.generic.kubelet import restore
from ansible_collections.kubenode.proxy.plugins.module_utils.preflight import kubelet
from ansible_collections.kubenode.proxy.plugins.module_utils.preflight.kubelet import read_record, reads_between
from tests.unit.generic.kubelet_files import ADDRESS, Files, TlsServer, everything_below

BEFORE = "https://192.0.2.11:6443"


@pytest.fixture
def pointed(tmp_path, good, servers) -> Files:
    """Provide a kubeconfig that was pointed to the address."""
    files = Files(tmp_path, good.authority)
    files.point(servers)
    return files


def leave(files, started=None, **options):
    """Restore the file while kubelet runs since a moment."""
    return restore(store=files.store, record=str(files.record), started=lambda: started, check=False, **options)


def server(files):
    return next(line for line in files.path.read_text().splitlines() if line.startswith("    server: ")).split()[1]


def test_the_record_stays_until_kubelet_was_restarted(pointed, servers):
    url = f"https://{servers[-1].place}"
    started = time.monotonic()
    outcome = leave(pointed, started)
    assert (outcome.before, outcome.after, outcome.in_use) == (url, BEFORE, url)
    assert server(pointed) == BEFORE and not pointed.backup.exists()
    # Again, as after a run that failed: nothing is written, and kubelet must still be restarted.
    for _run in range(2):
        again = leave(pointed, started)
        assert (again.before, again.after, again.in_use) == (BEFORE, BEFORE, url)
        assert not again.warnings
    assert len(pointed.stored) == 2
    assert leave(pointed, time.monotonic()).in_use == ""
    assert not pointed.record.parent.exists() and leave(pointed, started) is None


def test_a_rollback_knows_the_server_that_kubelet_uses(pointed, servers):
    """Whether it runs or not: it reads the file at its next start."""
    url, now = f"https://{servers[-1].place}", time.monotonic()

    def used(started):
        return kubelet.used_server(str(pointed.record), lambda: started)

    def unread(started):
        return kubelet.is_unread(str(pointed.record), lambda: started)

    assert used(None) == used(now) == url
    # It was written after one that runs since before, and has read it if it was started since.
    assert [unread(each) for each in (None, 0.0, now)] == [False, True, False]
    leave(pointed, now)
    assert used(now) == url and used(None) == used(time.monotonic()) == ""
    leave(pointed)
    assert used(now) == ""


def test_check_mode_predicts_it_and_changes_nothing(tmp_path, pointed, servers):
    before = everything_below(tmp_path)
    started = time.monotonic()
    outcome = restore(store=pointed.store, record=str(pointed.record), started=lambda: started, check=True)
    assert outcome.in_use == f"https://{servers[-1].place}" and outcome.after == BEFORE
    assert everything_below(tmp_path) == before


@pytest.mark.parametrize("ago", [None, 1000.0])
def test_a_kubelet_that_never_read_the_address_needs_no_restart(tmp_path, pointed, ago):
    assert leave(pointed, None if ago is None else time.monotonic() - ago).in_use == ""
    assert server(pointed) == BEFORE and not pointed.record.exists()


def test_a_record_of_an_earlier_version_requires_the_restart(pointed, servers):
    known = json.loads(pointed.record.read_text())
    pointed.record.write_text(json.dumps({name: known[name] for name in ("path", "before", "written", "backup")}))
    assert leave(pointed, time.monotonic() - 1000).in_use == f"https://{servers[-1].place}"


def test_a_file_that_another_program_rewrote_before_kubelet_started_is_left(pointed):
    pointed.path.write_text(pointed.text.replace("192.0.2.11", "192.0.2.99"))
    outcome = leave(pointed, time.monotonic() + 1)
    assert outcome.in_use == "" and "another program" in outcome.warnings[0]
    assert not pointed.record.exists()


def test_a_file_that_another_program_rewrote_after_kubelet_started_is_still_in_use(pointed):
    started = time.monotonic()
    time.sleep(0.05)
    pointed.path.write_text(pointed.text.replace("192.0.2.11", "192.0.2.99"))
    assert leave(pointed, started).in_use
    assert server(pointed) == "https://192.0.2.99:6443"


def test_the_way_back_and_forth_does_not_hide_a_kubelet_on_the_address(pointed, servers):
    started = time.monotonic()
    leave(pointed, started)
    pointed.point(servers)
    assert leave(pointed, started).in_use == f"https://{servers[-1].place}"


def test_an_address_that_stays_is_not_left(tmp_path, pointed, servers):
    before = everything_below(tmp_path)
    assert leave(pointed, time.monotonic(), kept=servers[-1].place) is None
    assert everything_below(tmp_path) == before


def test_a_new_address_that_a_certificate_lacks_changes_nothing(tmp_path, pointed, servers):
    before = everything_below(tmp_path)
    places = [item.place for item in servers[:2]]
    with pytest.raises(ApiError, match=r"its certificate lacks the name 127\.0\.0\.77"):
        leave(pointed, time.monotonic(), kept=Place("127.0.0.77", 6443), servers=places, seconds=0.5)
    assert everything_below(tmp_path) == before


def test_another_server_is_used_where_the_original_one_does_not_answer(tmp_path, good, servers):
    files = Files(tmp_path, good.authority, server="https://127.0.0.1:1")
    files.point(servers)
    new = Place(ADDRESS, 7443)
    places = [servers[0].place]
    outcome = leave(files, time.monotonic(), kept=new, servers=places, seconds=0.5)
    assert outcome.after == f"https://{servers[0].place}" == server(files)


def test_the_original_server_is_preferred(tmp_path, good, servers):
    original = TlsServer("127.0.0.1", good)
    files = Files(tmp_path, good.authority, server=f"https://{original.place}")
    files.point(servers)
    leave(files, time.monotonic(), kept=Place(ADDRESS, 7443), servers=[servers[0].place], seconds=0.5)
    assert server(files) == f"https://{original.place}"
    original.close()


def test_moments_of_another_boot_are_over(monkeypatch):
    moment = kubelet.present_moment()
    started = time.monotonic() - 1
    assert reads_between(started, "", moment) and not reads_between(started, moment, "")
    monkeypatch.setattr(kubelet, "boot_identity", lambda: "another")
    assert not reads_between(started, "", moment) and reads_between(started, moment, "")
    assert not reads_between(None, "", moment)


@pytest.mark.parametrize(
    ("output", "started"),
    [
        ("MainPID=7\nExecMainStartTimestampMonotonic=2500000\n", 2.5),
        ("MainPID=0\nExecMainStartTimestampMonotonic=2500000\n", None),
        ("", None),
    ],
)
def test_the_start_of_kubelet_is_read_from_systemd(monkeypatch, tmp_path, output, started):
    (tmp_path / "output").write_text(output)
    program = tmp_path / "systemctl"
    program.write_text(f"#!/bin/sh\ncat {tmp_path}/output\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert kubelet.kubelet_start() == started


def test_a_damaged_record_names_its_file(pointed):
    pointed.record.write_text("{}")
    with pytest.raises(Exception, match=r"cannot be read: .*; write the server .* back by hand, and remove the record"):
        read_record(str(pointed.record))
