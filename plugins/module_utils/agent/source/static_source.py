# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Static Services as the agent follows them: the manifests of a directory, read again when a file changes."""

from __future__ import annotations

from ...cluster.files.static import StaticDirectory, StaticObjects
from ..telemetry.log import Log

#: How often to poll for changed files. A poll costs one stat(2) for each file.
CHECK_SECONDS = 2.0


class StaticSource:
    """Follows a directory of manifests. ``objects``: the result of the last read."""

    def __init__(self, path: str, log: Log) -> None:
        self._directory = StaticDirectory(path)
        self._log = log
        self.objects = StaticObjects()
        self._read()

    def follow(self, path: str) -> None:
        """Set the directory to read with the next poll."""
        if path != self._directory.path:
            self._directory = StaticDirectory(path)

    def poll(self) -> bool:
        """Read the directory if a file has changed; return whether that changed anything."""
        before = self.objects
        if self._directory.changed():
            self._read()
        return self.objects != before

    def _read(self) -> None:
        before, self.objects = self.objects, self._directory.read()
        for refusal in self.objects.refusals:
            if refusal not in before.refusals:
                self._log.warning("a manifest of a static Service cannot be used", refused=refusal)
        if self.objects.services != before.services or self.objects.slices != before.slices:
            names = ", ".join(str(name) for name in sorted(self.objects.services))
            self._log.info("static Services", directory=self._directory.path, services=names or "none")
