# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Elements of sets as nf_tables reports them: those of one size, decoded together, and all others."""

from __future__ import annotations

import struct
from typing import Any, Optional

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.netlink.attributes import (
    attribute,
    nested,
    text_attribute,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.nftables import decoding
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.nftables.attributes import (
    NFTA_COUNTER_BYTES,
    NFTA_COUNTER_PACKETS,
    NFTA_DATA_VALUE,
    NFTA_DATA_VERDICT,
    NFTA_EXPR_DATA,
    NFTA_EXPR_NAME,
    NFTA_SET_ELEM_DATA,
    NFTA_SET_ELEM_EXPR,
    NFTA_SET_ELEM_FLAGS,
    NFTA_SET_ELEM_KEY,
    NFTA_VERDICT_CHAIN,
    NFTA_VERDICT_CODE,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.nftables.decoding import added_up, parse_elements
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.nftables.messages import CATCH_ALL

# linux/netfilter/nf_tables.h
NFTA_LIST_ELEM = 1
NFT_GOTO = -4

Pair = tuple[bytes, Any]


def encoded(key: Optional[bytes], value: Any, *more: bytes) -> bytes:
    """Return an element as nf_tables reports it; ``key`` is None in the element for all other keys."""
    parts = [] if key is None else [nested(NFTA_SET_ELEM_KEY, attribute(NFTA_DATA_VALUE, key))]
    if isinstance(value, bytes):
        parts.append(nested(NFTA_SET_ELEM_DATA, attribute(NFTA_DATA_VALUE, value)))
    elif value is not True:
        chain = value.split()[1].encode() + b"\x00"
        code = attribute(NFTA_VERDICT_CODE, struct.pack(">i", NFT_GOTO))
        verdict = nested(NFTA_DATA_VERDICT, code, attribute(NFTA_VERDICT_CHAIN, chain))
        parts.append(nested(NFTA_SET_ELEM_DATA, verdict))
    return nested(NFTA_LIST_ELEM, *parts, *more)


def keys(size: int) -> st.SearchStrategy[bytes]:
    return st.binary(min_size=size, max_size=size)


def values() -> st.SearchStrategy[Any]:
    chains = st.sampled_from(["goto chain", "goto another-chain"])
    return st.one_of(st.just(True), st.binary(min_size=1, max_size=20), chains)


@st.composite
def of_one_size(draw: st.DrawFn) -> list[Pair]:
    size, width = draw(st.integers(1, 24)), draw(st.integers(0, 20))
    data = keys(width) if width else st.just(True)
    return draw(st.lists(st.tuples(keys(size), data), max_size=30))


@st.composite
def of_all_sizes(draw: st.DrawFn) -> list[Pair]:
    return draw(st.lists(st.tuples(st.binary(min_size=1, max_size=24), values()), max_size=30))


@given(st.lists(st.one_of(of_one_size(), of_all_sizes()), max_size=3))
def test_elements_are_the_encoded_ones_in_their_order(parts):
    nests = [b"".join([encoded(key, value) for key, value in pairs]) for pairs in parts]
    expected = dict(pair for pairs in parts for pair in pairs)
    assert list(parse_elements(nests).items()) == list(expected.items())


FLAGS = attribute(NFTA_SET_ELEM_FLAGS, struct.pack(">I", 1))
USER_DATA = attribute(6, b"text")
SAME = [(bytes([number]) * 8, bytes([number]) * 8) for number in range(5)]


@pytest.mark.parametrize("more", [FLAGS, USER_DATA], ids=["flags", "user data"])
@pytest.mark.parametrize("position", range(5))
@pytest.mark.parametrize("with_data", [False, True], ids=["set", "map"])
def test_an_element_with_more_attributes_is_decoded_among_others_of_one_size(more, position, with_data):
    pairs = [(key, data if with_data else True) for key, data in SAME]
    parts = [
        encoded(key, value, more) if at == position else encoded(key, value) for at, (key, value) in enumerate(pairs)
    ]
    assert parse_elements([b"".join(parts)]) == dict(pairs)
    assert parse_elements([b"".join(encoded(key, value, more) for key, value in pairs)]) == dict(pairs)


def counter(packets: int) -> bytes:
    """Return the attribute with the counter of an element."""
    numbers = attribute(NFTA_COUNTER_BYTES, struct.pack(">Q", 60 * packets))
    numbers += attribute(NFTA_COUNTER_PACKETS, struct.pack(">Q", packets))
    return nested(NFTA_SET_ELEM_EXPR, text_attribute(NFTA_EXPR_NAME, "counter"), nested(NFTA_EXPR_DATA, numbers))


MEMBERS = [(key, True) for key, _data in SAME]


@pytest.mark.parametrize("pairs", [SAME, MEMBERS], ids=["map", "set"])
@pytest.mark.parametrize("uncounted", [None, 0, 2, 4])
def test_counters_of_elements_are_no_part_of_their_values(uncounted, pairs):
    parts = [
        encoded(key, value, *([counter(number)] if number != uncounted else []))
        for number, (key, value) in enumerate(pairs)
    ]
    assert parse_elements([b"".join(parts)]) == dict(pairs)


@pytest.mark.parametrize("pairs", [SAME, MEMBERS], ids=["map", "set"])
def test_elements_with_counters_are_decoded_together(monkeypatch, pairs):
    monkeypatch.setattr(decoding, "each_attribute", None)
    parts = [encoded(key, value, counter(number)) for number, (key, value) in enumerate(pairs)]
    assert parse_elements([b"".join(parts)]) == dict(pairs)


def test_an_element_of_the_same_size_but_another_form_is_decoded_among_others():
    # The headers of the data need eight bytes.
    pairs = [*SAME, (bytes(range(24)), True), (b"123456789abc", b"1234")]
    parts = [encoded(key, value) for key, value in pairs]
    assert len(set(map(len, parts))) == 1
    assert parse_elements([b"".join(parts)]) == dict(pairs)
    assert parse_elements([b"".join(reversed(parts))]) == dict(pairs)


def test_the_element_for_all_other_keys_is_decoded():
    pairs = [*SAME, (None, b"x" * 8)]
    expected = {**dict(SAME), CATCH_ALL: b"x" * 8}
    assert parse_elements([b"".join(encoded(key, value) for key, value in pairs)]) == expected


def test_a_second_dump_that_repeats_the_first_adds_nothing():
    large = {number.to_bytes(4, "big"): True for number in range(1000)}
    dumps = [dict(large), {}]
    assert added_up(lambda: dumps.pop(0), None) == large
    assert not dumps
