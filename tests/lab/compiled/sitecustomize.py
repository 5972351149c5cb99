# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Keep the compiled code of what Python imports from zip archives, in the directory that KUBENODE_COMPILED names.

Python itself keeps compiled code for files only. Ansible sends each module as an archive, of which the node compiles up
to 300 files for one task; with this file's directory in PYTHONPATH, each is compiled once. The code is found by the
content of its source, so a changed file is compiled again.
"""

from __future__ import annotations

import _imp
import marshal
import os
import sys
import zipimport
from types import CodeType
from typing import Any

_DIRECTORY = os.environ.get("KUBENODE_COMPILED", "")
_compile: Any = getattr(zipimport, "_compile_source", None)


def _load(pathname: str, source: bytes) -> CodeType:
    """Return the compiled source of the file at this path in an archive."""
    name = f"{sys.implementation.cache_tag}-{sys.hexversion:x}-{sys.flags.optimize}-{_imp.source_hash(0, source).hex()}"
    path = f"{_DIRECTORY}/{name}"
    try:
        with open(path, "rb") as file:
            code: CodeType = marshal.loads(file.read())
    except OSError:
        code = _compile(pathname, source)
        _store(path, code)
        return code
    # Ansible's archive has another path each time; tracebacks show it.
    _imp._fix_co_filename(code, pathname)  # type: ignore[attr-defined]
    return code


def _store(path: str, code: CodeType) -> None:
    partial = f"{path}.{os.getpid()}"
    try:
        # Never a file that a process of another container, with the same ID, is writing.
        with open(partial, "xb") as file:
            file.write(marshal.dumps(code))
        os.rename(partial, path)
    except OSError:
        # The process may not write there, as one of another user: it has compiled the code for itself.
        return


if _DIRECTORY and _compile is not None:
    zipimport._compile_source = _load  # type: ignore[attr-defined]
