# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""``python -m tests.documentation [--check] [--record]``: write the generated files, or list those out of date."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Optional, Sequence

from tests.conftest import ROOT
from tests.monitoring import dashboard
from tests.parity import facts, surface

from . import collection, module_reference, session, settings, variables

RECORDING = Path("examples/demo-session.txt")
PICTURE = Path("docs/demo.svg")
# Sections of the recording to show in the picture, with the number of lines to keep of each.
SECTIONS = {"Preview": 24, "The same again": 9, "Who answers, through lab-ipvs": 9, "Drift": 12, "Result": 9}


def generated(root: Path = ROOT) -> dict[Path, str]:
    """Return the expected content of every generated file, by its path from the top."""
    from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.behaviour import KUBE_PROXY_RELEASE

    reference = module_reference.pages(collection.modules(root), collection.inventories(root))
    files = {Path("docs") / name: text for name, text in reference.items()}
    files[Path("docs/variables.md")] = variables.page(collection.roles(root))
    files.update(settings.pages(root))
    recording = (root / RECORDING).read_text(encoding="utf-8")
    files[PICTURE] = session.picture(session.excerpt(recording, SECTIONS), "make demo (extract)")
    files[facts.PAGE] = facts.page()
    files[surface.GATES_MODULE] = surface.gates_module(KUBE_PROXY_RELEASE)
    files[dashboard.PATH] = dashboard.dashboard_text()
    return files


def stale(root: Path = ROOT) -> list[str]:
    """Return the paths of generated files that are missing or differ, and of pages of modules that no longer exist."""
    files = generated(root)
    wrong = [
        str(path)
        for path, text in files.items()
        if not (root / path).exists() or (root / path).read_text(encoding="utf-8") != text
    ]
    pages = (path.relative_to(root) for path in (root / "docs" / "modules").glob("*.md"))
    return wrong + [str(path) for path in pages if path not in files]


def record(root: Path = ROOT) -> None:
    """Run the demonstration and record its output. Needs root, as the demonstration does."""
    done = subprocess.run([sys.executable, "-m", "tests.lab.demo"], cwd=root, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"the demonstration ended with status {done.returncode}:\n{done.stdout[-2000:]}")
    (root / RECORDING).write_text(done.stdout.lstrip("\n").replace(f"{root}/", ""), encoding="utf-8")


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Write the generated files; with --check only compare."""
    parser = argparse.ArgumentParser(prog="python -m tests.documentation", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; end with 1 if a file is out of date")
    parser.add_argument("--record", action="store_true", help="run the demonstration and record it first")
    options = parser.parse_args(arguments)
    if options.record:
        record()
    if options.check:
        wrong = stale()
        if wrong:
            sys.stderr.write(f"error: out of date, run make docs: {', '.join(wrong)}\n")
        return 1 if wrong else 0
    files = generated()
    for path in set((ROOT / "docs" / "modules").glob("*.md")):
        if path.relative_to(ROOT) not in files:
            path.unlink()
    for path, text in files.items():
        (ROOT / path).parent.mkdir(parents=True, exist_ok=True)
        (ROOT / path).write_text(text, encoding="utf-8")
    sys.stdout.write(f"{len(files)} files written\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
