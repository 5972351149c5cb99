# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""End a module on an unsupported Python with one clear line, instead of a traceback.

A module imports this file before any other of the collection. Python 3.6, the oldest that ansible-core 2.16 runs
modules with, must be able to parse both, so they do without ``from __future__ import annotations``. On a supported
Python, the imports that follow are made faster.
"""

import json
import sys
from typing import Sequence

MINIMUM = (3, 9)


def refusal(version: Sequence[int], interpreter: str) -> str:
    """Return why modules cannot run on a version of Python; empty if they can."""
    if tuple(version[:2]) >= MINIMUM:
        return ""
    found, wanted = (".".join(map(str, numbers)) for numbers in (version, MINIMUM))
    return (
        f"Python {found} ({interpreter}) is too old: modules of kubenode.proxy need {wanted} or later on the node. "
        f"Install one and set ansible_python_interpreter to it, for example to /usr/bin/python{wanted}"
    )


_REFUSAL = refusal(sys.version_info[:3], sys.executable)
if _REFUSAL:
    sys.stdout.write(json.dumps({"failed": True, "msg": _REFUSAL, "error_kind": "python"}) + "\n")
    raise SystemExit(1)

if __name__ != "__main__":
    # A Python that is too old cannot parse it.
    from . import payload_imports

    payload_imports.main()
