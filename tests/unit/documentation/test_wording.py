# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Keep phrases that readers must decode out of code and documentation."""

from __future__ import annotations

import re

import pytest

from tests.conftest import ROOT

#: Each phrase, and what to write instead.
BANNED = {
    "anew": "again, or: recreate",
    "as far as": "if, where, or: to the extent that",
    "ask for": "request",
    "asked for": "requested",
    "asks for": "requests",
    "for ever": "forever",
    "foreign": "external, or: of other programs",
    "go back": "roll back, return",
    "go on": "continue",
    "goes back": "rolls back, returns",
    "goes on": "continues",
    "had to be": "needed to be",
    "half-way": "halfway",
    "has to be": "must be",
    "have to be": "must be",
    "in spite of": "although, or: ignoring",
    "leave out": "skip, omit",
    "leaves out": "skips, omits",
    "left out": "skipped, omitted",
    "looked at": "inspected, read, checked",
    "nobody else": "no other user, no other program",
    "so many": "this many, or name the number",
    "somebody": "name the actor: another program, the user",
    "someone": "name the actor: another program, the user",
    "stand for": "mean, replace",
    "stands for": "means, replaces",
    "take away": "remove",
    "taken away": "removed",
    "taken up": "applied, added",
    "takes away": "removes",
    "takes back": "reverts",
    "takes up": "applies, adds",
    "tell apart": "distinguish",
    "tells": "reports, shows, returns",
    "told": "reported, identified",
    "what is there": "the current state",
    "whoever": "name the actor: the user who, the process that",
}

PLACES = (
    *("plugins", "roles", "playbooks", "docs", "examples", "extensions", "molecule", "tests", ".ci", "Makefile"),
    *("README.md", "CONTRIBUTING.md", "SECURITY.md"),
)
#: The programs in .ci and the Makefile have no suffix.
KINDS = frozenset(("", ".css", ".html", ".j2", ".js", ".json", ".md", ".py", ".sh", ".yaml", ".yml"))

#: Files that are not prose of this project: recorded answers of a real API server, and this list itself.
EXCLUDED = ("tests/data/", "tests/unit/documentation/test_wording.py")
#: Names that are data: a conformance case, which its recordings name too.
NAMES = ("foreign-rules",)

# A phrase may continue on the next line, behind the mark of a comment or a quotation.
_SPACE = r"(?:\s|#:?|>)+"
_PHRASE = re.compile(r"\b(?:" + "|".join(sorted(BANNED)).replace(" ", _SPACE) + r")\b", re.IGNORECASE)


def banned_phrases(text: str) -> list[str]:
    """Return ``LINE: PHRASE`` for each banned phrase in a text, in the order of the lines."""
    for name in NAMES:
        text = text.replace(name, "")
    return [
        f"{text.count(chr(10), 0, match.start()) + 1}: {re.sub(_SPACE, ' ', match[0]).lower()}"
        for match in _PHRASE.finditer(text)
    ]


def files():
    for place in PLACES:
        path = ROOT / place
        yield from sorted(path.rglob("*")) if path.is_dir() else [path]


def test_no_file_has_a_banned_phrase():
    found = []
    for path in files():
        name = path.relative_to(ROOT).as_posix()
        if path.suffix in KINDS and path.is_file() and not name.startswith(EXCLUDED):
            found += [f"{name}:{hit} ({BANNED[hit.partition(': ')[2]]})" for hit in banned_phrases(path.read_text())]
    assert not found, "\n".join(["write it in plain English:", *found])


@pytest.mark.parametrize("phrase", sorted(BANNED))
def test_the_check_finds_a_phrase_across_lines_and_comments(phrase):
    broken = phrase.replace(" ", "\n    # ").capitalize()
    assert banned_phrases(f"first line\n# {broken}.") == [f"2: {phrase}"]
    assert banned_phrases(f"x{phrase}x") == []


def test_excluded_names_and_files_exist():
    assert all((ROOT / "tests/conformance/cases" / name).is_dir() for name in NAMES)
    assert all((ROOT / path).exists() for path in EXCLUDED)
