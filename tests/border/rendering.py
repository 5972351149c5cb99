# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Render texts as ansible-rulebook renders the arguments of an action. Runs in ansible-rulebook's own environment.

Reads a JSON object of texts, and writes for each, and for each value of a rulebook, the rendered value: as the
YAML document that ansible-rulebook would write. With jinja2 alone, it renders as ansible-rulebook 1.3.2 does.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import jinja2
import yaml
from jinja2.nativetypes import NativeEnvironment


def rendered(value: str, context: dict[str, Any]) -> Any:
    """Return a value with its variables substituted."""
    try:
        from ansible_rulebook.util import substitute_variables
    except ImportError:
        return NativeEnvironment(undefined=jinja2.StrictUndefined).from_string(value).render(context)
    return substitute_variables(value, context)


def safely(value: str, text: str) -> Any:
    """Return a value with a text; ansible-rulebook ends the action of one that is no valid vault."""
    try:
        return rendered(value, {"text": text})
    except Exception as error:
        if "vault" not in str(error).lower():
            raise
        return "not rendered: vault"


def task(found: Any) -> dict[str, Any]:
    """Return a task of the playbook that ansible-rulebook writes."""
    return {"name": "Module wrapper", "ansible.builtin.debug": {"msg": found}}


if __name__ == "__main__":
    given = json.load(sys.stdin)
    written = {
        "events": [
            task({name: safely(value, text) for name, text in given["events"].items()}) for value in given["values"]
        ],
        # One for each, since an error ends a task.
        "control": [{**task(safely("{{ text }}", text)), "ignore_errors": True} for text in given["control"].values()],
    }
    yaml.dump(written, sys.stdout)
