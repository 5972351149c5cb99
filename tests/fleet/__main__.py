# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""``python -m tests.fleet``: render the documentation's picture of the fleet report, with a generated fleet."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.conftest import ROOT  # makes the collection importable for the samples

from .browser import Browser

PICTURE = Path("docs/fleet-report.png")
WIDTH, NODES = 1280, 1000


def main() -> int:
    """Write the picture: everything above the table of the nodes, compared with a report of some minutes before."""
    from ansible_collections.kubenode.proxy.plugins.module_utils.controller.fleet.page import page

    from .samples import earlier, fleet, report

    with tempfile.TemporaryDirectory() as scratch, Browser(WIDTH, 800) as browser:
        file = Path(scratch) / "fleet-report.html"
        file.write_text(page(report(fleet(NODES), earlier(NODES))), encoding="utf-8")
        browser.emulate()
        browser.open(file)
        # A node with something to report.
        browser.run("document.querySelector('#matrix .s-drifted').click()")
        bottom = browser.run("document.getElementById('table').getBoundingClientRect().top + window.scrollY")
        browser.resize(WIDTH, round(bottom) - 8)
        (ROOT / PICTURE).write_bytes(browser.picture())
        if browser.complaints:
            sys.stderr.write("".join(f"error: {complaint}\n" for complaint in browser.complaints))
            return 1
    sys.stdout.write(f"{PICTURE} written\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
