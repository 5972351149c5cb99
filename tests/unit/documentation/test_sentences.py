# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A sentence that people read has at most 35 words; lists of facts are tables or lists."""

from __future__ import annotations

import re
from typing import Iterator

import pytest

from tests.conftest import ROOT
from tests.unit.documentation.test_line_length import pages

WORDS = 35
_LIST_ITEM = re.compile(r"\s*(?:[-*]|\d+\.) ")
_SKIPPED = re.compile(r"\s*(?:\||#|!\[|<!--|---)")
_LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
_CODE = re.compile(r"`[^`]*`")
# A sentence ends before a space; a colon before a list of several lines ends one as well.
_END = re.compile(r"[.!?;](?:\*\*|[)\"'])?(?=\s)|:$")
_WORD = re.compile(r"\w")


def paragraphs(text: str) -> Iterator[str]:
    """Yield the paragraphs and list items of a page; tables, code, headings and pictures are no sentences."""
    current: list[str] = []
    in_list = False
    for line in [*re.sub(r"```.*?```", "", text, flags=re.DOTALL).splitlines(), ""]:
        item = bool(_LIST_ITEM.match(line))
        code = line.startswith("    ") and not in_list
        if item or code or not line.strip() or _SKIPPED.match(line):
            if current:
                yield " ".join(current)
            current = []
        if item:
            in_list = True
            line = _LIST_ITEM.sub("", line)
        elif line.strip() and not line.startswith(" "):
            in_list = in_list and bool(current)
        if line.strip() and not code and not _SKIPPED.match(line):
            current.append(line.strip())


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a page; code and addresses of links count as the one word or the text that is read."""
    for paragraph in paragraphs(text):
        plain = _CODE.sub("code", _LINK.sub(r"\1", paragraph))
        yield from (sentence.strip() for sentence in _END.split(plain) if sentence.strip())


def words(sentence: str) -> int:
    """Return how many words a sentence has; dots between links and dashes are none."""
    return sum(1 for word in sentence.split() if _WORD.search(word))


def long_sentences(text: str) -> list[str]:
    """Return the sentences of a page with too many words, each with their number."""
    return [f"{words(found)}: {found}" for found in sentences(text) if words(found) > WORDS]


@pytest.mark.parametrize("page", [page for page in pages() if not page.startswith("tests/")])
def test_sentences_are_short(page):
    assert long_sentences((ROOT / page).read_text(encoding="utf-8")) == []


def test_a_long_sentence_is_noticed():
    long = "word " * 36
    assert len(long_sentences(f"{long}.\n")) == len(long_sentences(f"- one\n- {long}\n\n  {long}\n")) - 1 == 1
    half = "word " * 18
    assert len(long_sentences(f"{half}\n{half}[and a](link.md).\n")) == 1


def test_what_no_reader_reads_as_a_sentence_is_not_counted():
    half, long = "word " * 18, "word " * 36
    assert long_sentences(f"{half}. {half}\n\n{half}\n- {half}\n- {half}\n") == []
    assert long_sentences(f"# {long}\n\n| {long} |\n\n    {long}\n\n```\n{long}\n```\n\n![{long}](x.svg)\n") == []
    assert long_sentences(f"`{long}` is [one](https://example.org/{'a' * 99}) word\n") == []
