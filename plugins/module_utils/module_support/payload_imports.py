# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Import what Ansible sends with a module without compiling it twice.

Ansible sends a zip archive of sources. Python's importer of such archives compiles a source to say which file it is in,
which every import asks, and compiles it again to run it. Compiling the 250 sources of a convergence takes longer than
reading the state of a large cluster.
"""

from __future__ import annotations

import sys
import zipimport
from os.path import join


class PayloadImporter(zipimport.zipimporter):
    """Imports modules from an archive that has sources and no bytecode."""

    def get_filename(self, fullname: str) -> str:
        """Return the path of a module's source. Raises ZipImportError if there is no such module."""
        path = join(self.archive, self.prefix + fullname.rpartition(".")[2])
        return join(path, "__init__.py") if self.is_package(fullname) else f"{path}.py"


def use_in(archive: str) -> None:
    """Import the archive's remaining modules through PayloadImporter; other archives are not affected."""

    def importer(path: str) -> zipimport.zipimporter:
        found = zipimport.zipimporter(path)
        return PayloadImporter(path) if found.archive == archive else found

    hooks = sys.path_hooks
    if zipimport.zipimporter in hooks:
        hooks[hooks.index(zipimport.zipimporter)] = importer
        for path, finder in list(sys.path_importer_cache.items()):
            if isinstance(finder, zipimport.zipimporter) and finder.archive == archive:
                sys.path_importer_cache[path] = PayloadImporter(path)


def main() -> None:
    """Install it for the archive of this module, if that is an archive of sources."""
    loader = globals().get("__loader__")
    if isinstance(loader, zipimport.zipimporter) and not __file__.endswith(".pyc"):
        use_in(loader.archive)
