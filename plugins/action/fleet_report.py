# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Run kubenode.proxy.fleet_report on the controller, where the results and the files of the page are."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Optional

from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import ProxyError
from ansible_collections.kubenode.proxy.plugins.module_utils.controller.fleet import document
from ansible_collections.kubenode.proxy.plugins.module_utils.controller.fleet.nodes import read_nodes
from ansible_collections.kubenode.proxy.plugins.module_utils.controller.fleet.page import page
from ansible_collections.kubenode.proxy.plugins.module_utils.controller.fleet.sources import read_entries, read_previous
from ansible_collections.kubenode.proxy.plugins.module_utils.module_support.binary_files import replace_file
from ansible_collections.kubenode.proxy.plugins.module_utils.module_support.tables import failure
from ansible_collections.kubenode.proxy.plugins.module_utils.packaging.identity import (
    collection_version,
    source_identity,
)

_ENGINE = str(Path(__file__).resolve().parents[1] / "module_utils")
_ARGUMENTS = {
    "source": {"type": "path", "required": True},
    "html_file": {"type": "path"},
    "json_file": {"type": "path"},
    "previous": {"type": "path"},
    "title": {"type": "str", "default": "Service proxy fleet"},
    "stale_after": {"type": "float", "default": 7200.0},
}


def earlier(path: Optional[str]) -> Optional[dict[str, Any]]:
    """Return the document of the earlier report, None with a warning if the file holds something else."""
    try:
        return None if path is None else read_previous(path, document.SCHEMA)
    except ProxyError as error:
        Display().warning(f"nothing is compared with the previous report: {error}")
        return None


def reported(options: dict[str, Any], check: bool) -> dict[str, Any]:
    """Read the results, write the requested files unless ``check``, and return the summary. Raises ProxyError."""
    nodes = read_nodes(read_entries(options["source"]))
    about = document.About(
        generated=time.time(),
        title=options["title"],
        collection_version=collection_version(_ENGINE),
        engine=source_identity(_ENGINE).text,
        stale_after=options["stale_after"],
    )
    report = document.make_report(nodes, about, earlier(options["previous"]))
    result: dict[str, Any] = {
        "changed": False,
        "sentence": document.one_sentence(report),
        "summary": document.summary(report),
        "exceptions": {found.kind: found.nodes for found in report.exceptions},
    }
    for option, write in (("html_file", page), ("json_file", document.document_text)):
        path = options[option]
        if path is not None:
            changed = replace_file(path, write(report).encode("utf-8"), check=check)
            result["changed"] = result["changed"] or changed
            result[option] = path
    return result


class ActionModule(ActionBase):
    """The action of the module, which has no part that runs on a host."""

    _requires_connection = False
    _supports_check_mode = True

    def run(self, tmp: Optional[str] = None, task_vars: Optional[dict[str, Any]] = None) -> dict[str, Any]:
        """Return the result of the task."""
        result: dict[str, Any] = super().run(tmp, task_vars)
        _validation, options = self.validate_argument_spec(_ARGUMENTS)
        try:
            result.update(reported(options, self._task.check_mode))
        except ProxyError as error:
            result.update(failed=True, **failure(error))
        return result
