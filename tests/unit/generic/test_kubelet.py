# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""kubelet's kubeconfig: written only if each server's certificate has the address, and restored exactly."""

from __future__ import annotations

import contextlib
import json
from typing import Iterator

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import ApiError, ConfigurationError
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.api.access.certificate import Place
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.api.access.server_field import (
    server_field,
    with_server,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.generic.kubelet import parse_place
from tests.apiserver.tls import Certificates, make_certificates, make_server_certificate
from tests.unit.generic.kubelet_files import ADDRESS, NAMES, Files, TlsServer, everything_below


@pytest.fixture(scope="module")
def another(tmp_path_factory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("another"), NAMES)


@pytest.fixture
def lacking(tmp_path_factory, good) -> Iterator[TlsServer]:
    """Provide a server of the same authority whose certificate lacks the address."""
    directory = tmp_path_factory.mktemp("lacking")
    server = TlsServer("127.0.0.3", make_server_certificate(directory, good.authority, ("127.0.0.3",)))
    yield server
    server.close()


@pytest.fixture
def files(tmp_path, good) -> Files:
    return Files(tmp_path, good.authority)


def test_the_server_is_written_once_and_restored_exactly(tmp_path, files, servers):
    before = everything_below(tmp_path)
    checked = files.point(servers, check=True)
    assert everything_below(tmp_path) == before
    outcome = files.point(servers)
    url = f"https://{servers[-1].place}"
    assert outcome == checked and not outcome.warnings
    assert (outcome.before, outcome.after) == ("https://192.0.2.11:6443", url)
    assert files.path.read_text() == files.text.replace("https://192.0.2.11:6443", url)
    assert files.backup.read_text() == files.text and files.backup.stat().st_mode & 0o777 == 0o600
    again = files.point(servers)
    assert again.before == again.after == url and len(files.stored) == 1
    assert files.restore(check=True) == files.restore()
    assert everything_below(tmp_path) == before and not files.record.parent.exists()
    assert files.restore() is None


def test_each_missing_name_is_reported_and_nothing_is_changed(tmp_path, files, lacking, servers):
    before = everything_below(tmp_path)
    with pytest.raises(ApiError) as raised:
        files.point([servers[0], lacking, servers[-1]])
    expected = f"API server {lacking.place}: its certificate lacks the name {ADDRESS}; it has localhost, 127.0.0.3"
    assert str(raised.value) == expected
    assert everything_below(tmp_path) == before


def test_the_kubeconfigs_server_name_is_verified_instead(tmp_path, good, lacking, servers):
    files = Files(tmp_path, good.authority, more="    tls-server-name: localhost\n")
    assert files.point([servers[0], lacking, servers[-1]]).after == f"https://{servers[-1].place}"


def test_a_server_that_cannot_be_reached_is_refused(tmp_path, files, servers):
    before = everything_below(tmp_path)
    servers[0].close()
    with pytest.raises(ApiError, match=f"^API server {servers[0].place}: cannot be reached by TLS: Connection refused"):
        files.point(servers, seconds=0.2)
    assert everything_below(tmp_path) == before


def test_an_address_that_is_not_served_is_refused_and_a_warning_in_check_mode(tmp_path, files, servers):
    before = everything_below(tmp_path)
    servers[-1].close()
    with pytest.raises(ApiError, match=f"^API server {servers[-1].place}: cannot be reached by TLS"):
        files.point(servers, seconds=0.2)
    outcome = files.point(servers, seconds=0.2, check=True)
    assert len(outcome.warnings) == 1 and "not served yet" in outcome.warnings[0]
    assert everything_below(tmp_path) == before


def test_an_address_that_leads_elsewhere_is_refused(tmp_path, files, good, servers):
    elsewhere = TlsServer(ADDRESS, make_server_certificate(tmp_path / "elsewhere", good.authority, NAMES))
    before = everything_below(tmp_path)
    with (
        contextlib.closing(elsewhere),
        pytest.raises(ApiError, match="presents a certificate that none of the servers"),
    ):
        files.point([*servers[:2], elsewhere], seconds=0.2)
    assert everything_below(tmp_path) == before


def test_servers_of_another_authority_are_refused(tmp_path, files, another, servers):
    other = TlsServer("127.0.0.4", another)
    before = everything_below(tmp_path)
    with contextlib.closing(other), pytest.raises(ApiError, match="cannot be verified by the kubeconfig's authority"):
        files.point([servers[0], other, servers[-1]], seconds=0.2)
    assert everything_below(tmp_path) == before


@pytest.mark.parametrize("more", ["    insecure-skip-tls-verify: true\n", "    proxy-url: http://192.0.2.1:3128\n"])
def test_a_kubeconfig_without_verification_is_refused(tmp_path, good, servers, more):
    files = Files(tmp_path, good.authority, more=more)
    if "insecure" in more:
        lines = [line for line in files.text.splitlines(True) if "certificate-authority-data" not in line]
        files.path.write_text("".join(lines))
    with pytest.raises(ConfigurationError, match=more.split(":", maxsplit=1)[0].strip()):
        files.point(servers)
    assert files.stored == []


def test_another_address_later_keeps_the_original(tmp_path, files, good, servers):
    files.point(servers)
    second = TlsServer(ADDRESS, good)
    with contextlib.closing(second):
        assert files.point([*servers[:2], second]).after == f"https://{second.place}"
    assert files.backup.read_text() == files.text
    files.restore()
    assert files.path.read_text() == files.text


def test_a_server_that_another_program_has_written_is_kept(files, servers):
    files.point(servers)
    written = files.text.replace("192.0.2.11", "192.0.2.99")
    files.path.write_text(written)
    outcome = files.restore()
    assert outcome is not None and outcome.before == outcome.after and "another program" in outcome.warnings[0]
    assert files.path.read_text() == written
    assert not files.backup.exists() and not files.record.exists()


def test_a_file_rewritten_by_kubeadm_is_changed_again(files, servers):
    files.point(servers)
    files.path.write_text(files.text.replace("192.0.2.11", "192.0.2.12"))
    files.point(servers)
    files.restore()
    assert files.path.read_text() == files.text.replace("192.0.2.11", "192.0.2.12")


def test_another_file_restores_the_first(tmp_path, files, good, servers):
    files.point(servers)
    (tmp_path / "other").mkdir()
    other = Files(tmp_path / "other", good.authority)
    other.record = files.record
    other.point(servers)
    assert files.path.read_text() == files.text and not files.backup.exists()
    other.restore()
    assert other.path.read_text() == other.text


def test_no_servers_are_refused(files, servers):
    with pytest.raises(ConfigurationError, match="servers: is empty"):
        files.point(servers[-1:])


JSON = json.dumps(
    {
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "k"}}],
        "clusters": [{"name": "k", "cluster": {"server": "https://192.0.2.1"}}],
    }
)


@pytest.mark.parametrize("text", [JSON, JSON.replace(" ", ""), json.dumps(json.loads(JSON), indent=1)])
def test_json_is_changed_in_place(text):
    changed = with_server(text, "https://[fd00::1]:6443", "k")
    assert changed == text.replace("https://192.0.2.1", "https://[fd00::1]:6443")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "is not valid YAML"),
        ("[]", "no current context"),
        (JSON.replace('"c"', '"d"', 1), "no current context"),
        (JSON.replace('"server"', '"other"'), "cluster 'k' of the kubeconfig has no server"),
        (JSON.replace('"https://192.0.2.1"', '""'), "has no server"),
        ("current-context: c\ncontexts: [{name: c, context: {cluster: k}}]\nclusters: 7\n", "has no server"),
    ],
)
def test_files_that_are_not_a_kubeconfig_are_refused(text, reason):
    with pytest.raises(ConfigurationError, match=reason):
        server_field(text, "k")


def test_a_server_that_other_fields_refer_to_is_refused():
    text = JSON.replace("{", "{\n").replace('"https://192.0.2.1"', '&url "https://192.0.2.1", "proxy-url": *url')
    with pytest.raises(ConfigurationError, match="cannot be replaced alone"):
        with_server(text, "https://192.0.2.2", "k")


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("192.0.2.1", Place("192.0.2.1", 6443)),
        ("192.0.2.1:7443", Place("192.0.2.1", 7443)),
        ("fd00::1", Place("fd00::1", 6443)),
        ("[fd00:0::1]:7443", Place("fd00::1", 7443)),
    ],
)
def test_places(text, place):
    assert parse_place(text, 6443) == place


@pytest.mark.parametrize("text", ["", "api.example.com", "192.0.2.1:0", "192.0.2.1:x", "192.0.2.1:70000", "[fd00::1]"])
def test_invalid_places(text):
    with pytest.raises(ConfigurationError, match="is not of the form"):
        parse_place(text, 6443)
