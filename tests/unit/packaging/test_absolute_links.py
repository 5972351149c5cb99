# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The pages that Galaxy shows have absolute links in the tarball, if galaxy.yml names a repository."""

from __future__ import annotations

import shutil
import subprocess
import sys

import yaml

from tests.conftest import ROOT
from tests.unit.documentation.test_links import links

HOME = "https://git.example.org/kubenode/proxy"
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("roles/*/README.md"))]


def rewritten(directory, galaxy):
    """Return the pages of a copy of the sources after the program has run, by their path."""
    for page in PAGES:
        copy = directory / page.relative_to(ROOT)
        copy.parent.mkdir(parents=True)
        shutil.copy(page, copy)
    (directory / "galaxy.yml").write_text(galaxy)
    subprocess.run([sys.executable, ROOT / ".ci" / "absolute-links", directory], check=True)
    return {page: directory / page.relative_to(ROOT) for page in PAGES}


def test_links_lead_to_the_files_of_the_tag(tmp_path):
    galaxy = (ROOT / "galaxy.yml").read_text(encoding="utf-8")
    version = yaml.safe_load(galaxy)["version"]
    for page, copy in rewritten(tmp_path / "copy", f"{galaxy}repository: {HOME}/\n").items():
        assert links(page) and links(copy) == []
        text = copy.read_text(encoding="utf-8")
        for target in links(page):
            file, hash_, anchor = target.partition("#")
            path = (page.parent / file).resolve().relative_to(ROOT) if file else page.relative_to(ROOT)
            kind = "raw" if path.suffix == ".svg" else "blob"
            assert f"]({HOME}/{kind}/{version}/{path}{hash_}{anchor})" in text, target


def test_without_a_repository_nothing_changes(tmp_path):
    for page, copy in rewritten(tmp_path / "copy", "version: 1.0.0\n").items():
        assert copy.read_bytes() == page.read_bytes()
