# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Lines that the controller prints for people."""

from __future__ import annotations

from typing import Any

#: Callbacks that print one document for programs on standard output.
_FOR_PROGRAMS = ("json", "jsonl")


def for_people(line: str, callback: str) -> dict[str, Any]:
    """Return the arguments with which Ansible's display prints a line, beside a document that a ``callback`` prints.

    A host may not write control sequences to the terminal.
    """
    text = "".join(character if character.isprintable() else "?" for character in line)
    return {"msg": text, "stderr": callback.rpartition(".")[2] in _FOR_PROGRAMS}
