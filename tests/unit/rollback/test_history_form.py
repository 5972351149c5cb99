# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Test the file format of saved states: round trips, and one-line errors for other files."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import HistoryError
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.nftables.raw.reading import (
    RawChain,
    RawSet,
    StatefulKey,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.parameters.sysctl_profile import KEYS
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.xtables.saved import SavedChainKey
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.ipvs import model as ipvs
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.nftables.objects import TABLE_KEY, ObjectKey
from ansible_collections.kubenode.proxy.plugins.module_utils.rollback import directory, form, store
from ansible_collections.kubenode.proxy.plugins.module_utils.rollback.state import ChainsState, NodeState
from tests.campaigns import examples

WORDS = st.text(alphabet="abcXYZ-0189", min_size=1, max_size=12)
LINES = st.text(alphabet=st.characters(min_codepoint=32, max_codepoint=0x2FF), max_size=30)
ADDRESSES = st.one_of(
    st.ip_addresses(v=4).map(str), st.integers(1, 0xFFFF).map(lambda number: f"fd00:1:2:3:4:5:6:{number:x}")
)
PORTS = st.integers(0, 65535)
RAW = st.binary(max_size=40)
SERVERS = st.builds(ipvs.VirtualServerKey, st.sampled_from(["tcp", "udp", "sctp"]), ADDRESSES, PORTS)
NFT = st.one_of(
    st.tuples(st.just(TABLE_KEY), RAW),
    st.tuples(
        st.builds(ObjectKey, st.just("chain"), WORDS), st.builds(RawChain, RAW, st.lists(RAW, max_size=3).map(tuple))
    ),
    st.tuples(
        st.builds(ObjectKey, st.just("set"), WORDS), st.builds(RawSet, RAW, st.lists(RAW, max_size=3).map(tuple))
    ),
    st.tuples(st.builds(StatefulKey, st.just("object"), st.integers(1, 9), WORDS), RAW),
)
CHAINS = st.builds(
    ChainsState,
    st.sampled_from(["IPv4", "IPv6"]),
    st.sampled_from(["nft", "legacy"]),
    st.lists(WORDS, max_size=3).map(tuple),
    st.dictionaries(
        st.builds(SavedChainKey, st.sampled_from(["chain", "builtin"]), WORDS, WORDS),
        st.lists(LINES, max_size=4).map(tuple),
        max_size=4,
    ),
)
STATES = st.builds(
    NodeState,
    chains=st.lists(CHAINS, max_size=3).map(tuple),
    nftables=st.dictionaries(st.sampled_from(["IPv4", "IPv6"]), st.lists(NFT, max_size=5).map(dict)),
    ipvs_tables=st.dictionaries(st.sampled_from(["IPv4", "IPv6"]), st.lists(NFT, max_size=5).map(dict)),
    network_policy=st.none() | st.lists(NFT, max_size=5).map(dict),
    sets=st.dictionaries(WORDS, st.builds(ipvs.SetDefinition, WORDS, st.sampled_from(["", "IPv4"]), PORTS), max_size=3),
    set_elements=st.dictionaries(st.builds(ipvs.SetElementKey, WORDS, WORDS), st.just(True), max_size=3),
    virtual_servers=st.dictionaries(SERVERS, st.builds(ipvs.VirtualServer, WORDS, PORTS, PORTS, PORTS), max_size=3),
    real_servers=st.dictionaries(
        st.builds(ipvs.RealServerKey, SERVERS, ADDRESSES, PORTS), st.builds(ipvs.RealServer, PORTS, WORDS), max_size=3
    ),
    devices=st.dictionaries(WORDS, WORDS, max_size=1),
    addresses=st.dictionaries(ADDRESSES, st.just(True), max_size=3),
    timeouts=st.dictionaries(WORDS, PORTS, max_size=3),
    sysctls=st.dictionaries(st.sampled_from(sorted(KEYS)), st.integers(0, 10**18).map(str), max_size=3),
    exclude_cidrs=st.lists(WORDS, max_size=2).map(tuple),
    policies_standalone=st.booleans(),
)
SAMPLE = NodeState(
    chains=(ChainsState("IPv4", "nft", ("nat",), {SavedChainKey("chain", "nat", "KUBE-SERVICES"): ("-j RETURN",)}),),
    nftables={"IPv4": {TABLE_KEY: b"\x00", ObjectKey("chain", "services"): RawChain(b"\x01", (b"\x02",))}, "IPv6": {}},
    virtual_servers={ipvs.VirtualServerKey("tcp", "10.96.0.1", 443): ipvs.VirtualServer("rr", 0, 0, 32)},
    sysctls={"net.ipv4.ip_forward": "1"},
)


def record(state: NodeState, number: int = 1) -> form.StateRecord:
    return form.StateRecord(
        number=number,
        created="2026-01-02T03:04:05Z",
        reason=store.BEFORE_CONVERGENCE,
        kernel="6.1.0",
        engine="abc",
        boot="boot",
        state=state,
    )


def changed(**fields: Any) -> bytes:
    """Return the sample's file with other values in its state and a valid checksum."""
    state = {**form.encode_state(SAMPLE), **fields}
    body = json.dumps({**record(SAMPLE)._asdict(), "state": state}).encode()
    return packed({"sha256": form.hashlib.sha256(body).hexdigest()}, body)


def packed(head: dict[str, Any], body: bytes) -> bytes:
    # Without a time, which would be part of the test names and differ between processes.
    return gzip.compress(json.dumps({"format": form.FORMAT, "version": 1, **head}).encode() + b"\n" + body, mtime=0)


@settings(max_examples=examples(150), deadline=None)
@given(state=STATES, number=st.integers(1, 999_999))
def test_states_survive_packing(state, number):
    assert form.unpack_record(form.pack_record(record(state, number))) == record(state, number)


def test_the_same_state_gives_the_same_bytes():
    assert form.pack_record(record(SAMPLE)) == form.pack_record(record(SAMPLE))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "not a saved state, or truncated"),
        (b"kube-proxy", "not a saved state, or truncated"),
        (form.pack_record(record(SAMPLE))[:-9], "not a saved state, or truncated"),
        (gzip.compress(b"{}\n{}", mtime=0), "not a saved state of kubenode-proxy"),
        (packed({"version": 2}, b"{}"), "its version is 2, this engine reads version 1"),
        (packed({"sha256": "0"}, b"{}"), "does not match its checksum"),
        (changed(sets=[["KUBE-X", "hash:ip", "IPv4"]]), "field sets: is not a list of entries with 4 values each"),
        (changed(sysctls=[]), "field sysctls: is not a mapping"),
        (changed(sysctls={"net.ipv4.ip_forward": 1}), "field sysctls: is not a list of entries: 1 is not text"),
        (
            changed(sysctls={"kernel.core_pattern": "|/bin/sh"}),
            "field sysctls: is not a mapping of kernel parameters that a service proxy sets: 'kernel.core_pattern'",
        ),
        (changed(sysctls={"net.netfilter.nf_conntrack_max": "x"}), "nf_conntrack_max: 'x'"),
        (changed(timeouts={"tcp": -1}), "field timeouts: is not a list of entries: -1 is not a number"),
        (changed(addresses=["10.96.0.1 dev eth0"]), "field addresses: is not a list of addresses"),
        (changed(nftables={"IPv4": [[["chain", "x"], "no base64!", []]]}), "field nftables: is not in Base64"),
        (changed(policies_standalone="yes"), "field policies_standalone: is not true or false"),
        (changed(network_policy=None), "field network_policy: is not a list"),
        (changed(network_policy=[[["chain", 1], "", []]]), "field network_policy: is not a list of entries: 1 is not"),
        (changed(virtual_servers=[["tcp", "10.96.0.1", "80", "rr", 0, 0, 32]]), "'80' is not a number"),
        (changed(chains=[{"family": "IPv4"}]), "field variant: is not text"),
        (changed(chains="x"), "field chains: is not a list"),
    ],
)
def test_files_that_are_not_saved_states_give_one_line_errors(content, reason):
    with pytest.raises(HistoryError) as raised:
        form.unpack_record(content)
    assert reason in str(raised.value)
    assert "\n" not in str(raised.value)


def test_no_flipped_bit_changes_a_state():
    """Bits without a meaning, such as gzip's time and the padding after its last block, may be accepted."""
    packed_record = form.pack_record(record(SAMPLE))
    accepted = []
    for bit in range(8 * len(packed_record)):
        content = bytearray(packed_record)
        content[bit // 8] ^= 1 << bit % 8
        try:
            unpacked = form.unpack_record(bytes(content))
        except HistoryError:
            continue
        assert unpacked == record(SAMPLE), bit
        accepted.append(bit)
    assert len(accepted) < 8 * 10 + 8


@pytest.fixture
def history(tmp_path) -> store.History:
    return store.History(str(tmp_path / "history"), keep=3)


def test_states_are_numbered_kept_and_forgotten(history):
    for number in range(1, 6):
        assert history.save(SAMPLE).number == number
    assert history.numbers() == [3, 4, 5]
    assert history.save(SAMPLE, store.BEFORE_ROLLBACK, kept=[3]).number == 6
    assert history.numbers() == [3, 5, 6]
    assert history.newest() == 5
    assert history.load(3).state == SAMPLE
    listed = history.list()
    assert [item.number for item in listed] == [6, 5, 3]
    assert listed[0].mode == "nftables" and listed[0].counts["virtual_servers"] == 1
    assert sorted(os.listdir(history.directory)) == [f"state-{number:06d}.json.gz" for number in (3, 5, 6)]


def test_numbers_are_not_reused_while_anything_refers_to_them(history):
    history.save(SAMPLE)
    history.note(1, directory.CONFIRMED)
    os.unlink(Path(history.directory) / "state-000001.json.gz")
    assert history.save(SAMPLE).number == 2
    assert (history.outcome(1), history.outcome(2)) == ("confirmed", None)


def test_an_unusable_file_is_named_and_listed(history):
    history.save(SAMPLE)
    path = Path(history.directory) / "state-000001.json.gz"
    path.write_bytes(b"nonsense")
    with pytest.raises(HistoryError, match=r"state-000001\.json\.gz: not a saved state, or truncated"):
        history.load(1)
    assert "truncated" in history.list()[0].problem
    path.write_bytes(form.pack_record(record(SAMPLE, 7)))
    with pytest.raises(HistoryError, match="is the state 7, not 1"):
        history.load(1)


def test_a_directory_writable_by_other_users_is_not_trusted(history):
    history.save(SAMPLE)
    os.chmod(history.directory, 0o770)
    for use in (history.numbers, history.list, lambda: history.load(1), lambda: history.save(SAMPLE)):
        with pytest.raises(HistoryError, match="trusted only if no other user can write"):
            use()


def test_a_link_in_place_of_the_directory_is_not_followed(history, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    os.symlink(tmp_path / "elsewhere", history.directory)
    with pytest.raises(HistoryError, match="is not a directory"):
        history.save(SAMPLE)


def test_without_a_directory_the_history_is_empty(history):
    assert (history.numbers(), history.list(), history.outcomes()) == ([], [], {})
    with pytest.raises(HistoryError, match="no state saved before a convergence"):
        history.newest()
    with pytest.raises(HistoryError, match="at least 1 is needed"):
        store.History("/nowhere", keep=0)
