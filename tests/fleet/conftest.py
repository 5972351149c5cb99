# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""One browser for all tests; a missing browser is reported at the start."""

from __future__ import annotations

import pytest

from tests.fleet.browser import Browser, BrowserError, program


def pytest_sessionstart():
    """Fail at once without a browser instead of in every test."""
    try:
        program()
    except BrowserError as error:
        pytest.exit(f"the page is tested in a real browser: {error}", returncode=2)


@pytest.fixture(scope="session")
def browser():
    """Provide a browser."""
    with Browser() as made:
        yield made
