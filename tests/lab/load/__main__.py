# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""One process of a load: ``python -m tests.lab.load serve|ask|ask-patiently JSON``."""

from __future__ import annotations

import json
import sys
from typing import Sequence

from tests.lab.load.clients import Clients
from tests.lab.load.endpoints import serve
from tests.lab.load.model import Endpoint, Flow


def main(arguments: Sequence[str]) -> int:
    """Run ``serve``, ``ask`` or ``ask-patiently`` with the endpoints or flows given as JSON."""
    items = json.loads(arguments[1])
    if arguments[0] == "serve":
        serve([Endpoint(**item) for item in items])
    else:
        Clients([Flow(**item) for item in items], arguments[0] == "ask-patiently").run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
