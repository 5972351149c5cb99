# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Links in the documentation have targets, every page can be reached, and names are spelt as their owners do."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from tests.conftest import ROOT

PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("roles/*/README.md"),
        *ROOT.glob("molecule/*/README.md"),
    ]
)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
# The spelling of a name, and spellings that are wrong in prose.
SPELLINGS = {
    "Kubernetes": r"\bkubernetes cluster|\bK8s\b|\bkubernetes Service",
    "EndpointSlice": r"\bEndpoint ?slices?\b|\bendpoint slices?\b",
    "kube-proxy": r"\b[Kk]ubeproxy\b(?!\.)|\bKube-[Pp]roxy\b|\bkube proxy\b",
    "nftables": r"\bNFTables mode\b|\bNFTables\b|\bnf-tables\b",
    "IPVS": r"\bIpvs\b",
    "NodePort": r"\bNodeport\b",
    "ClusterIP": r"\bClusterIp\b|\bCluster-IP\b",
    "user-mode Linux": r"\bUser[- ]Mode Linux\b",
    "clean-up (noun)": r"\b[Cc]leanup (?:is|was|of the)\b",
}


def prose(path: Path) -> str:
    """Return the text of a page without code and addresses, where other spellings are correct."""
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    text = re.sub(r"(?m)^(?: {4}|\t).*$", "", text)
    text = re.sub(r"https?://[^\s)>]+", "", text)
    return re.sub(r"`[^`\n]*`", "`code`", text)


def anchors(path: Path) -> list[str]:
    """Return the anchors of a page's headings."""
    headings = re.findall(r"(?m)^#+ +(.+)$", path.read_text(encoding="utf-8"))
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings)
    return [re.sub(r"[^\w\- ]", "", heading).strip().replace(" ", "-") for heading in plain]


def links(path: Path) -> list[str]:
    """Return the targets of all links of a page except those to other hosts."""
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    return [target for target in LINK.findall(text) if not re.match(r"[a-z]+:", target)]


def test_files_of_tests_that_pages_name_exist() -> None:
    named = {
        (page.name, path)
        for page in PAGES
        for path in re.findall(r"`(tests/[\w./-]+)`", page.read_text(encoding="utf-8"))
    }
    assert len(named) > 20
    assert not [(page, path) for page, path in named if not (ROOT / path).exists()]


def broken(path: Path) -> list[str]:
    """Return the links of a page without a target."""
    found = []
    for target in links(path):
        file, _hash, anchor = target.partition("#")
        goal = (path.parent / file).resolve() if file else path
        inside = goal.exists() and ROOT in (goal, *goal.parents)
        if not inside or (anchor and goal.suffix == ".md" and anchor not in anchors(goal)):
            found.append(target)
    return found


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_have_a_target(path):
    assert broken(path) == []


def test_a_broken_link_is_noticed(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# A heading\n[good](page.md) [elsewhere](https://example.org/) [no](absent.md) [no](#nothing)\n")
    assert broken(page)[-2:] == ["absent.md", "#nothing"]


def test_every_page_can_be_reached_from_the_readme():
    seen: dict[Path, None] = {}
    waiting = [ROOT / "README.md"]
    while waiting:
        path = waiting.pop()
        if path in seen or path.suffix != ".md" or not path.exists():
            continue
        seen[path] = None
        waiting += [(path.parent / target.partition("#")[0]).resolve() for target in links(path) if target[0] != "#"]
    assert [str(page.relative_to(ROOT)) for page in PAGES if page not in seen] == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_names_are_spelt_as_elsewhere(path):
    text = prose(path)
    wrong = {name: found for name, pattern in SPELLINGS.items() if (found := re.findall(pattern, text))}
    assert wrong == {}


def test_no_page_names_a_machine():
    wrong = re.compile(r"(?<![\w./])/(?:work|root/\.|home/(?!user\b))[\w./-]*")
    pages = [*PAGES, *(path for path in ROOT.glob("examples/**/*") if path.is_file())]
    assert {str(page.relative_to(ROOT)) for page in pages if wrong.search(page.read_text(encoding="utf-8"))} == set()


@pytest.mark.parametrize("name", ["docs/dev/map.md", "docs/architecture.md"])
def test_source_files_that_are_named_exist(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    named = re.findall(r"`([\w./*-]+/[\w./*-]*\.py)`", text)
    homes = (ROOT, ROOT / "plugins" / "module_utils")
    assert len(named) > 5
    assert [path for path in named if not any(list(home.glob(path)) for home in homes)] == []


def test_the_site_has_every_page():
    """The pages of modules are reached from their index; others belong to one of the four groups."""
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    home, *groups = site["nav"]
    listed = [page for group in groups for pages in group.values() for page in pages]
    assert home == "README.md" and len(listed) == len(set(listed))
    assert {page for page in listed if not (ROOT / page).is_file()} == set()
    written = {str(path.relative_to(ROOT)) for pattern in ("docs/*.md", "docs/dev/*.md") for path in ROOT.glob(pattern)}
    assert written - set(listed) == set()
