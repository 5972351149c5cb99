# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Bundling of the agent's libraries for another host's Python into one archive that is only unpacked there.

On the controller, pip selects and downloads the wheels for the Python version and machine of the node and installs them
into a directory. The node needs neither pip nor access to a package index.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import re
import subprocess
import tarfile
from typing import NamedTuple, Sequence

from ..base.errors import ConfigurationError, ProxyError, os_errors

_VERSION = re.compile(r"3\.\d{1,2}\Z")
_MACHINE = re.compile(r"[a-z0-9_]{2,20}\Z")
# A name, optionally with versions. Other forms that pip accepts (options, URLs, paths) are refused.
_CLAUSE = r"[<>=!~]=?[A-Za-z0-9.*+!]+"
_REQUIREMENT = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]*(\[[A-Za-z0-9,._-]+\])?({_CLAUSE}(,{_CLAUSE})*)?\Z")
# Wheels for these C libraries and older ones run on every distribution that the collection supports.
_GLIBC_MINORS = (34, 28, 17, 12, 5)
_PIP_TIMEOUT_SECONDS = 600


class LibrariesError(ProxyError):
    """The libraries cannot be bundled on the controller."""


class Target(NamedTuple):
    """The Python that will import the libraries: ``version`` such as 3.11, ``machine`` such as x86_64 (glibc)."""

    version: str
    machine: str


def platforms(machine: str) -> list[str]:
    """Return the platform tags of wheels that run on a machine with glibc (PEP 600), newest first."""
    names = [f"manylinux_2_{minor}_{machine}" for minor in _GLIBC_MINORS]
    return [*names, f"manylinux2014_{machine}", f"linux_{machine}"]


def pip_arguments(
    target: Target, requirements: Sequence[str], destination: str, wheelhouse: str = "", pinned: str = ""
) -> list[str]:
    """Return the arguments with which pip installs the requirements for the target into the directory.

    With ``wheelhouse``, a directory of wheels, pip uses no index. With ``pinned``, a file of requirements with hashes,
    pip installs these and refuses wheels with other hashes. Raises ConfigurationError.
    """
    if not _VERSION.match(target.version):
        raise ConfigurationError(f"python_version: {target.version!r} is not of the form 3.11")
    if not _MACHINE.match(target.machine):
        raise ConfigurationError(f"machine: {target.machine!r} is not a machine such as x86_64")
    for requirement in requirements:
        if not _REQUIREMENT.match(requirement):
            raise ConfigurationError(f"requirements: {requirement!r} is not a name with versions, like kubernetes>=28")
    arguments = ["install", "--quiet", "--disable-pip-version-check", "--no-input", "--no-warn-conflicts"]
    arguments += ["--no-compile"]
    arguments += ["--target", destination, "--only-binary=:all:", "--implementation", "cp"]
    arguments += ["--python-version", target.version]
    for platform in platforms(target.machine):
        arguments += ["--platform", platform]
    if wheelhouse:
        arguments += ["--no-index", "--find-links", wheelhouse]
    if pinned:
        return [*arguments, "--require-hashes", "--requirement", pinned]
    return [*arguments, "--", *sorted(requirements)]


def install(python: str, arguments: Sequence[str]) -> None:
    """Run an interpreter's pip. Raises LibrariesError with pip's last error line."""
    environment = {**os.environ, "PIP_ROOT_USER_ACTION": "ignore", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [python, "-m", "pip", *arguments]
    try:
        with os_errors(LibrariesError, f"{python}: cannot be run"):
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=_PIP_TIMEOUT_SECONDS, check=False
            )
    except subprocess.TimeoutExpired as error:
        raise LibrariesError(f"pip did not finish within {_PIP_TIMEOUT_SECONDS} s") from error
    if done.returncode:
        words = [line for line in done.stderr.splitlines() if line.strip()] or [f"status {done.returncode}"]
        errors = [line for line in words if line.startswith("ERROR")]
        raise LibrariesError(f"pip on the controller: {(errors or words)[-1].replace('ERROR: ', '')}")


def pack_directory(directory: str) -> bytes:
    """Return a reproducible, gzip-compressed tar archive of the directory's files without programs and caches."""
    paths: list[str] = []
    for place, directories, files in os.walk(directory):
        if place == directory:
            # Start scripts contain the path of the controller's interpreter.
            directories[:] = [name for name in directories if name != "bin"]
        directories[:] = [name for name in directories if name != "__pycache__"]
        paths += [os.path.relpath(os.path.join(place, name), directory) for name in files]
    buffer = io.BytesIO()
    compressed = gzip.GzipFile(fileobj=buffer, mode="wb", compresslevel=9, mtime=0)
    with compressed, tarfile.open(fileobj=compressed, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for path in sorted(paths):
            with open(os.path.join(directory, path), "rb") as file:
                content = file.read()
            entry = tarfile.TarInfo(path)
            entry.size = len(content)
            entry.mode = 0o644
            archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def cache_name(target: Target, requirements: Sequence[str], wheelhouse: Sequence[str], pins: bytes = b"") -> str:
    """Return the name of the archive for a target, its requirements and the names of the wheels in the wheelhouse.

    ``pins``: content of the file with hashes; with other pins the archive has another name.
    """
    key = repr((tuple(sorted(requirements)), tuple(sorted(wheelhouse)), *([pins] if pins else []))).encode()
    return f"libraries-{target.version}-{target.machine}-{hashlib.sha256(key).hexdigest()[:16]}.tar.gz"
