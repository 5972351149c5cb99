# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Record what versions of kubectl make of each form: ``python -m tests.kubeconfig KUBECTL...``, as root."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from .forms import forms
from .laboratory import Laboratory, ask_kubectl

RECORDED = Path(__file__).with_name("recorded.json")


def _version(kubectl: str) -> str:
    words = [kubectl, "version", "--client", "-o", "json"]
    answer = json.loads(subprocess.run(words, stdout=subprocess.PIPE, check=True).stdout)
    return str(answer["clientVersion"]["gitVersion"]).lstrip("v")


def main(programs: list[str]) -> None:
    """Write the recording: one outcome for each form, or one for each version where they differ."""
    versions = [_version(program) for program in programs]
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        laboratory = Laboratory(Path(folder))
        for form in forms():
            outcomes = []
            for program in programs:
                with laboratory.placed(form) as placed:
                    outcomes.append(ask_kubectl(program, placed))
            same = all(_essence(outcome) == _essence(outcomes[-1]) for outcome in outcomes)
            found[form.name] = outcomes[-1] if same else dict(zip(versions, outcomes))
    RECORDED.write_text(json.dumps({"versions": versions, "forms": found}, indent=1, ensure_ascii=False) + "\n")
    print(f"{len(found)} forms, {sum('versions' not in x and 'hops' in x for x in found.values())} accepted by all")


def _essence(outcome: dict[str, Any]) -> Any:
    return outcome.get("hops", "refused")


if __name__ == "__main__":
    main(sys.argv[1:])
