# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""``python -m tests.monitoring``: write the Grafana dashboard."""

from __future__ import annotations

import sys

from tests.conftest import ROOT

from .dashboard import PATH, dashboard_text

(ROOT / PATH).write_text(dashboard_text(), encoding="utf-8")
sys.stdout.write(f"{PATH} written\n")
