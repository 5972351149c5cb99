# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Every block of commands in the documentation is run by a test, or listed with the reason why it is not.

tests/modules/test_documented_commands.py runs them.
"""

from __future__ import annotations

import re
import shlex
import subprocess

import pytest

from tests.conformance.wirelab.arguments import make_parser
from tests.conftest import ROOT
from tests.documentation.commands import NOT_RUN, blocks, command_blocks, inventory_of_readme, pages
from tests.e2e.binaries import PROGRAMS
from tests.modules.test_documented_commands import LIMITED, PAGES


def not_run(start):
    return next(block.text for page in pages() for block in command_blocks(page) if block.text.startswith(start))


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_no_block_is_fenced(page):
    """Only indented blocks are found here, and run."""
    assert "```" not in page.read_text(encoding="utf-8")


def test_every_block_of_commands_is_run_or_has_a_reason_not_to_be():
    found = [block for page in pages() for block in command_blocks(page)]
    assert {block.page for block in found if not block.why_not_run} == set(PAGES)
    assert all(any(block.text.startswith(start) for block in found) for start in (*NOT_RUN, *LIMITED))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_have_the_syntax_of_a_shell(page):
    for block in command_blocks(page):
        if not block.why_not_run:
            checked = subprocess.run(["bash", "-n"], input=block.text, capture_output=True, text=True)
            assert checked.returncode == 0, f"{block.place}: {checked.stderr}"


def test_lines_of_a_block_without_known_programs_are_no_commands(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("text\n\n    A=1 kubectl get nodes\n\ntext\n\n    chain x\n\n1. list\n\n       make x\n")
    assert [block.text for block in blocks(page)] == ["A=1 kubectl get nodes", "chain x"]
    assert [block.text for block in command_blocks(page)] == ["A=1 kubectl get nodes"]
    assert command_blocks(page)[0].line == 3


def test_options_of_the_conformance_lab_exist():
    for line in not_run("tests/conformance/lab ").splitlines():
        arguments = make_parser().parse_args(shlex.split(line)[1:])
        if arguments.command != "run":
            make_parser().parse_args([word for word in arguments.rest if word != "--"])


def test_the_programs_of_the_end_to_end_suite_are_built():
    text = not_run("CGO_ENABLED=0 go build ")
    braces = re.sub(r"(\S*)\{([^}]*)\}", lambda found: " ".join(found[1] + name for name in found[2].split(",")), text)
    built = {word.rpartition("/")[2] for word in braces.split()}
    assert set(PROGRAMS) - {"etcd"} <= built


def test_guide_for_the_documentation_site_has_the_inventory_of_the_readme():
    text = (ROOT / "docs/docsite/rst/guide_start.rst").read_text(encoding="utf-8")
    assert f"``{inventory_of_readme().strip()}``" in text
    assert inventory_of_readme() in (ROOT / "docs/automation.md").read_text(encoding="utf-8").replace("    ", "")
