# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Addition of bytecode to the zip application on a node, by the node's Python, so that it starts without compiling.

Python's importer of zip archives prefers ``module.pyc`` to ``module.py`` beside it, and ignores bytecode of another
version of Python: after an upgrade of Python the application starts as before, but more slowly. The importer never
writes to the archive, so only root, which installs it, can change the bytecode.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import io
import marshal
import os
import stat
import sys
import zipfile
from typing import Sequence

from ..base.regular_files import read_regular
from ..base.whole_files import write_whole
from .archive import archive_entry

MODE = 0o644
_MOST_BYTES = 1 << 26
# PEP 552: bytecode with a hash of the source that is not checked on import. An archive is replaced as a whole.
_UNCHECKED_HASH = (1).to_bytes(4, "little")
_SEAL_BYTES = hashlib.sha256().digest_size * 2


def _bytecode(source: bytes, path: str) -> bytes:
    code = compile(source, path, "exec", dont_inherit=True)
    header = importlib.util.MAGIC_NUMBER + _UNCHECKED_HASH + importlib.util.source_hash(source)
    return header + marshal.dumps(code)


def _seal(source: bytes, path: str, body: bytes) -> bytes:
    """Return a hash of what the archive was made from, and of its bytes before this hash, which is its comment."""
    parts = (importlib.util.MAGIC_NUMBER, path.encode(), source, body)
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest().encode()


def with_bytecode(source: bytes, path: str) -> bytes:
    """Return a zip application that also has this Python's bytecode of each module.

    ``path``: where it will be installed, for tracebacks. Raises zipfile.BadZipFile.
    """
    with zipfile.ZipFile(io.BytesIO(source)) as packed:
        modules = {name: packed.read(name) for name in packed.namelist() if name.endswith(".py")}
    buffer = io.BytesIO(source)
    with zipfile.ZipFile(buffer, "a") as archive:
        for name, content in modules.items():
            # Stored: decompressing would take a tenth of the time of all imports.
            entry = archive_entry(f"{name}c", zipfile.ZIP_STORED)
            archive.writestr(entry, _bytecode(content, os.path.join(path, name)))
        archive.comment = b"0" * _SEAL_BYTES
    body = buffer.getvalue()[:-_SEAL_BYTES]
    return body + _seal(source, path, body)


def is_current(source: bytes, path: str) -> bool:
    """Return whether the file is what this Python makes of the source, intact, and writable by its owner only."""
    try:
        found = os.lstat(path)
        content = read_regular(path, _MOST_BYTES)
    except OSError:
        return False
    if stat.S_IMODE(found.st_mode) != MODE or (found.st_uid, found.st_gid) != (os.geteuid(), os.getegid()):
        return False
    body = content[:-_SEAL_BYTES]
    return content[-_SEAL_BYTES:] == _seal(source, path, body)


def main(arguments: Sequence[str]) -> int:
    """Write the application with bytecode if it is not current, and print ``changed`` or ``unchanged``.

    The role agent calls this in the packed engine, with the Python that will run it.
    """
    parser = argparse.ArgumentParser(description="Add bytecode to a zip application.")
    parser.add_argument("source", help="the application as it was packed")
    parser.add_argument("path", help="the application that is run")
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args(arguments)
    try:
        source = read_regular(options.source, _MOST_BYTES)
        changed = not is_current(source, options.path)
        if changed and not options.check:
            write_whole(options.path, with_bytecode(source, options.path), MODE, (os.geteuid(), os.getegid()))
    except (OSError, zipfile.BadZipFile) as error:
        sys.stderr.write(f"{options.path}: {error}\n")
        return 1
    sys.stdout.write("changed\n" if changed else "unchanged\n")
    return 0
