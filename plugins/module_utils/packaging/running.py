# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Pack the running engine, or its part in an Ansible module's payload, into one executable file.

A module's files are removed when its task ends, so a program that runs later needs its own copy.
"""

from __future__ import annotations

import os
import sys
import zipfile

from ..base.errors import ConfigurationError, os_errors
from .archive import PACKAGE, zip_application
from .identity import NOT_SHIPPED, python_files


def _from_archive(top: str) -> dict[str, bytes]:
    archive = top
    while archive and not os.path.isfile(archive):
        archive, _slash, _rest = archive.rpartition("/")
    if not archive or not zipfile.is_zipfile(archive):
        raise ConfigurationError(f"{top}: the source of the running engine cannot be found")
    prefix = top[len(archive) + 1 :].rstrip("/") + "/"
    with zipfile.ZipFile(archive) as packed:
        names = [name for name in packed.namelist() if name.startswith(prefix) and name.endswith(".py")]
        return {name[len(prefix) :]: packed.read(name) for name in names}


def running_files(package: str = "") -> dict[str, bytes]:
    """Return the Python files of the running engine by path below its top package.

    They are read from a directory, an archive or a module's payload. Raises ConfigurationError if they cannot be found.
    """
    top = package or __name__.rsplit(".", 2)[0]
    places = list(getattr(sys.modules.get(top), "__path__", ()))
    if not places:
        raise ConfigurationError(f"{top}: the source of the running engine cannot be found")
    if os.path.isdir(places[0]):
        return python_files(places[0])
    with os_errors(ConfigurationError, places[0]):
        found = _from_archive(places[0])
    return {path: content for path, content in found.items() if path.split("/")[0] not in NOT_SHIPPED}


def pack_running(entry: str) -> bytes:
    """Return a zip application of the running engine that calls ``main(arguments)`` of the engine's module ``entry``.

    Raises ConfigurationError.
    """
    top = __name__.rsplit(".", 2)[0]
    if not entry.startswith(f"{top}."):
        raise ConfigurationError(f"{entry}: is not a part of {top}")
    inside = f"{PACKAGE}.{entry[len(top) + 1 :]}"
    main = f"import sys\n\nfrom {inside} import main\n\nsys.exit(main(sys.argv[1:]))\n"
    return zip_application(running_files(), main)
