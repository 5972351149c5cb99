# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Renew the pinned libraries of the role agent: the newest versions, with the SHA-256 of each wheel.

``python -m tests.pins`` queries the package index for the newest release of each library that every supported Python
can use, downloads its wheels for each Python and machine, and writes ``roles/agent/files/libraries.txt``. Review the
change before committing it: nodes will run these libraries.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from ansible_collections.kubenode.proxy.plugins.module_utils.controller.libraries import platforms

ROOT = Path(__file__).resolve().parents[1]
PINS = ROOT / "roles" / "agent" / "files" / "libraries.txt"
PYTHONS = ("3.9", "3.10", "3.11", "3.12", "3.13", "3.14")
MACHINES = ("x86_64", "aarch64")
#: The packages that the engine imports on a node in addition to the standard library.
REQUIREMENTS = ("PyYAML", "prometheus-client")
HEAD = """\
# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
#
# The agent's libraries for a wheelhouse: what pip on the controller may bring to nodes, by version and content.
# Written by "make pins", which takes the newest versions for Python {pythons} on {machines}.
"""


class Wheel(NamedTuple):
    """Version and hash to pin for a wheel."""

    version: str
    digest: str


def fetch(requirement: str, python: str, machine: str) -> Wheel:
    """Return version and hash of the wheel that pip selects for a target."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--implementation", "cp", "--python-version", python]
    for platform in platforms(machine):
        command += ["--platform", platform]
    with tempfile.TemporaryDirectory() as place:
        subprocess.run([*command, "--dest", place, requirement], check=True)
        (wheel,) = Path(place).iterdir()
        # PEP 427: name, version, tags.
        return Wheel(wheel.name.split("-")[1], hashlib.sha256(wheel.read_bytes()).hexdigest())


def pins() -> dict[str, set[str]]:
    """Return the wheel hashes of each library, by name and version."""
    found: dict[str, set[str]] = {}
    for name in REQUIREMENTS:
        # The oldest Python determines the version for all of them.
        pinned = f"{name}=={fetch(name, PYTHONS[0], MACHINES[0]).version}"
        found[pinned] = {fetch(pinned, python, machine).digest for python in PYTHONS for machine in MACHINES}
    return found


def text_of(found: dict[str, set[str]]) -> str:
    """Return the content of the file in pip's format."""
    lines: list[str] = [HEAD.format(pythons=f"{PYTHONS[0]} to {PYTHONS[-1]}", machines=" and ".join(MACHINES)).rstrip()]
    for pinned in sorted(found, key=str.lower):
        hashes = [f"    --hash=sha256:{digest}" for digest in sorted(found[pinned])]
        lines += [f"{pinned} \\", *(f"{line} \\" for line in hashes[:-1]), hashes[-1]]
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    PINS.write_text(text_of(pins()), encoding="utf-8")
