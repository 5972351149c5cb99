# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The border to Ansible: random texts, as rulebooks use them, are evaluated by the engine of ansible-core itself.

`tests.border.check` feeds them to whole programs of several versions.
"""

from __future__ import annotations

import warnings

import pytest
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ansible_collections.kubenode.proxy.plugins.module_utils.controller.border import (
    harmless,
    is_controller,
    other_meaning,
)
from tests.border.forms import ACTION, HARMLESS, LITERALS, RARE, TEMPLATES, VALUES
from tests.border.rendering import rendered
from tests.campaigns import examples

try:
    from ansible.template import trust_as_template
except ImportError:  # ansible-core before 2.19 evaluates any text.
    trust_as_template = str

ENGINE = Templar(DataLoader())
HOSTILE = [text.replace(ACTION, "6 * 7") for text in (*TEMPLATES.values(), *RARE.values(), *LITERALS.values())]
PIECES = (
    *("{", "{{", "{%", "{#", "}}", "6 * 7", "'", '"', "'''", "[%", "(", ")", "[", "]", ",", ":", " ", "\n", "\t", "\f"),
    *(
        "\\",
        "\\x7b",
        "\\173",
        "\\u007b",
        "\\U0000007b",
        "\\N{LEFT CURLY BRACKET}",
        "\\x5c",
        "x7b",
        "\\\n",
        "\\n",
        "\\'",
        "\\x7",
    ),
    *("#", "#jinja2:", "#jin", "ja2:", "jinja2:", "variable_start_string:'[%'", "\\x23", "\\x6a", "# c\n", "\ufeff"),
    *("$", "$ANSIBLE_VAULT", "$ANSI", "BLE_VAULT", "b'", "r'", 'u"', "b", "73", "007b", "a"),
)
TEXTS = st.one_of(st.lists(st.sampled_from(PIECES), max_size=10).map("".join), st.sampled_from(HOSTILE))


def strings(value):
    """Yield all strings in a value, keys included."""
    if isinstance(value, (str, bytes)):
        yield value if isinstance(value, str) else value.decode("latin-1")
    elif isinstance(value, dict):
        for pair in value.items():
            yield from strings(pair)
    elif isinstance(value, (list, tuple, set)):
        for item in value:
            yield from strings(item)


def evaluated(value, text):
    """Return the strings that are evaluated when a rulebook has the value, and the event the text."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found = list(strings(rendered(value, {"text": text})))
        except (TypeError, RecursionError):
            return []  # The literal cannot be made, which ends the action.
    return [
        text
        for text in found
        if "$ANSIBLE_VAULT" in text or any(map(is_template, (text, text.strip(), text.lstrip("\ufeff"))))
    ]


def is_template(text):
    try:
        return ENGINE.template(trust_as_template(text)) != text
    except Exception:
        return True


@pytest.mark.parametrize("text", HOSTILE)
def test_the_checks_notice_what_is_evaluated(text):
    values = ("#{{ text }}", *VALUES) if text.startswith("jinja2:") else VALUES
    assert any(evaluated(value, text) for value in values)


@settings(max_examples=examples(250), deadline=None)
@given(TEXTS, TEXTS)
@example("'{' ", "'{ 6 * 7 }}'")
@example(r"'\17", r"3{ 6 * 7 }}'")
@example("#jin", "ja2: variable_start_string:'[%'\n[% 6 * 7 }}")
def test_no_text_is_evaluated_alone_or_beside_another(first, second):
    crossed = harmless(first), harmless(second)
    assert [text.replace(" ", "") for text in crossed] == [first.replace(" ", ""), second.replace(" ", "")]
    assert tuple(map(harmless, crossed)) == crossed
    for text in (crossed[0], "".join(crossed)):
        assert {value: found for value in VALUES for found in evaluated(value, text)} == {}
    assert evaluated("#{{ text }}", crossed[0]) == []


@pytest.mark.parametrize("text", HARMLESS)
def test_a_harmless_text_arrives_unchanged(text):
    assert harmless(text) == text


def test_a_long_text_is_changed_at_once():
    assert harmless("'\\x7b'" * 100_000).startswith("'\\ x7b'")


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1", "127.1", "2130706433", "0x7f000001", "0", "a.localhost"])
def test_a_name_of_the_controller_is_no_name_of_a_node(name):
    assert (is_controller(name), other_meaning(name)) == (True, "a name of the controller")


@pytest.mark.parametrize("address", ["::1", "::ffff:127.0.0.1", "LOCALHOST", "::"])
def test_an_address_of_the_controller_is_known(address):
    assert is_controller(address)


@pytest.mark.parametrize("name", ["w1", "10.0.0.1", "localhosts", "my-localhost", "all-1", "1", "127"])
def test_other_names_mean_nodes(name):
    assert other_meaning(name) == ""
