# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Packing of the engine into one zip application, byte for byte the same for the same source.

In the archive the engine is the package ``kubenode_proxy``. It uses only relative imports, so it runs under any name.
"""

from __future__ import annotations

import io
import zipfile
from typing import Mapping, NamedTuple

from ..base.errors import ConfigurationError
from .identity import VERSION_FILE, Identity, source_files, source_identity

PACKAGE = "kubenode_proxy"
DEFAULT_INTERPRETER = "/usr/bin/python3"
# The earliest time that a zip archive can represent.
_TIME = (1980, 1, 1, 0, 0, 0)
# Libraries shipped with the agent are in a directory next to the archive and take precedence over the system's.
_MAIN = f"""\
import os
import sys

libraries = os.path.join(os.path.dirname(os.path.abspath(sys.argv[0])), "libraries")
if os.path.isdir(libraries):
    sys.path.insert(1, libraries)

from {PACKAGE}.command.cli import main

sys.exit(main(sys.argv[1:]))
"""


class Archive(NamedTuple):
    """A packed engine: its identity, and the bytes of the zip application."""

    identity: Identity
    content: bytes


def archive_entry(name: str, compression: int = zipfile.ZIP_DEFLATED) -> zipfile.ZipInfo:
    """Return the entry of a file in an archive, with a time, a creator and a mode that are always the same."""
    entry = zipfile.ZipInfo(name, _TIME)
    entry.compress_type = compression
    # Always marked as created on Unix, so that the bytes are reproducible, and readable by all users.
    entry.create_system = 3
    entry.external_attr = 0o100644 << 16
    return entry


def interpreter_line(interpreter: str) -> bytes:
    """Return the first line (``#!``) of the application. Raises ConfigurationError unless it is one absolute path."""
    if not interpreter.startswith("/") or not interpreter.isprintable() or " " in interpreter or len(interpreter) > 120:
        raise ConfigurationError(f"interpreter: {interpreter!r} is not an absolute path without blanks")
    return f"#!{interpreter}\n".encode()


def zip_application(files: Mapping[str, bytes], main: str, first_line: bytes = b"") -> bytes:
    """Pack the engine's files, by path below its top package, into one file that runs the Python program ``main``.

    The bytes depend only on the arguments.
    """
    members = {f"{PACKAGE}/{path}": content for path, content in files.items()}
    for path in list(members):
        # A directory without an __init__.py is a package too, but not every tool for archives recognises it.
        parts = path.split("/")
        for depth in range(1, len(parts)):
            members.setdefault("/".join([*parts[:depth], "__init__.py"]), b"")
    members["__main__.py"] = main.encode()
    buffer = io.BytesIO()
    buffer.write(first_line)
    with zipfile.ZipFile(buffer, "a") as archive:
        for name in sorted(members):
            archive.writestr(archive_entry(name), members[name])
    return buffer.getvalue()


def pack(directory: str, interpreter: str = DEFAULT_INTERPRETER) -> Archive:
    """Pack the engine whose top package is in a directory. Raises ConfigurationError."""
    first_line = interpreter_line(interpreter)
    files = source_files(directory)
    packed = source_identity(directory)
    return Archive(packed, zip_application({**files, VERSION_FILE: f"{packed.record}\n".encode()}, _MAIN, first_line))
