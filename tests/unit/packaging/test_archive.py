# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The archive: reproducible, complete, and run by a Python without the source tree on its path."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from io import BytesIO
from pathlib import Path

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import ConfigurationError
from ansible_collections.kubenode.proxy.plugins.module_utils.packaging import archive, identity

SOURCE = Path(__file__).resolve().parents[3] / "plugins/module_utils"


def small_engine(directory: Path) -> Path:
    """Return a source tree in the engine's layout whose command prints its own hash."""
    shutil.copytree(SOURCE / "packaging", directory / "packaging", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(SOURCE / "base", directory / "base", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(SOURCE / "resources.py", directory)
    (directory / "command").mkdir()
    lines = ["from ..packaging.identity import identity", "def main(argv):", "    print(identity().engine)"]
    (directory / "command/cli.py").write_text("\n".join([*lines, "    return len(argv)", ""]))
    (directory / "module_support").mkdir()
    (directory / "module_support/ansible_only.py").write_text("import ansible\n")
    return directory


def test_same_source_gives_same_bytes_whatever_times_and_caches(tmp_path):
    first = small_engine(tmp_path / "one")
    second = small_engine(tmp_path / "two")
    os.utime(second / "resources.py", (1, 1))
    (second / "__pycache__").mkdir()
    (second / "__pycache__/resources.cpython-311.pyc").write_bytes(b"x")
    (second / "notes.txt").write_text("not shipped")
    assert archive.pack(str(first)) == archive.pack(str(second))
    (second / "resources.py").write_text((second / "resources.py").read_text() + "\n")
    assert archive.pack(str(first)).identity != archive.pack(str(second)).identity


def test_interpreter_changes_the_first_line_and_not_the_version(tmp_path):
    source = str(small_engine(tmp_path / "engine"))
    usual, other = archive.pack(source), archive.pack(source, "/opt/python/bin/python3.9")
    assert usual.content.startswith(b"#!/usr/bin/python3\n")
    assert other.content.startswith(b"#!/opt/python/bin/python3.9\n")
    assert usual.identity == other.identity


@pytest.mark.parametrize("interpreter", ["python3", "/usr/bin/env python3", "/a\nb", ""])
def test_interpreter_that_is_not_a_path_is_refused(tmp_path, interpreter):
    with pytest.raises(ConfigurationError, match="interpreter"):
        archive.pack(str(small_engine(tmp_path / "engine")), interpreter)


def test_directory_without_the_engine_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="does not contain the engine"):
        archive.pack(str(tmp_path))


def test_archive_runs_on_its_own_and_knows_its_hash(tmp_path):
    packed = archive.pack(str(small_engine(tmp_path / "engine")), sys.executable)
    program = tmp_path / "kubenode-proxy"
    program.write_bytes(packed.content)
    program.chmod(0o755)
    done = subprocess.run([str(program), "a", "b"], capture_output=True, text=True, cwd="/", env={}, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (2, packed.identity.engine + "\n", "")


def test_libraries_next_to_the_archive_take_precedence(tmp_path):
    source = small_engine(tmp_path / "engine")
    (source / "command/cli.py").write_text("import yaml\n\n\ndef main(argv):\n    return yaml.NUMBER\n")
    (tmp_path / "libraries").mkdir()
    (tmp_path / "libraries/yaml.py").write_text("NUMBER = 42\n")
    (tmp_path / "engine.pyz").write_bytes(archive.pack(str(source)).content)
    assert subprocess.run([sys.executable, "-I", "engine.pyz"], cwd=tmp_path, check=False).returncode == 42


def test_complete_engine_without_code_that_needs_ansible():
    packed = archive.pack(str(SOURCE))
    members = zipfile.ZipFile(BytesIO(packed.content)).namelist()
    assert members == sorted(members)
    assert "kubenode_proxy/command/cli.py" in members and "kubenode_proxy/kernel/nftables/messages.py" in members
    assert not [name for name in members if "module_support" in name or "__pycache__" in name]
    assert packed.identity == identity.identity() == archive.pack(str(SOURCE)).identity
    assert len(packed.content) < 2_000_000


def test_every_part_of_the_archive_can_be_imported(tmp_path):
    program = tmp_path / "engine.pyz"
    program.write_bytes(archive.pack(str(SOURCE)).content)
    script = (
        "import importlib, sys, zipfile\n"
        "names = [n[:-3].replace('/', '.') for n in zipfile.ZipFile(sys.path[0]).namelist() if n.endswith('.py')]\n"
        "for name in names:\n"
        "    if name != '__main__': importlib.import_module(name.replace('.__init__', ''))\n"
        "assert 'ansible' not in sys.modules\n"
        "print(len(names))\n"
    )
    code = f"import sys; sys.path.insert(0, {str(program)!r})\n{script}"
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, cwd="/", check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 80


def test_installed_hash(tmp_path):
    assert identity.installed_identity(str(tmp_path / "none")) is None
    found = identity.source_identity(str(SOURCE))
    (tmp_path / "VERSION").write_text(f"{found.record}\n")
    assert identity.installed_identity(str(tmp_path / "VERSION")) == found


@pytest.mark.parametrize("text", ["", "abc", "0.1.0", "0.1.0+xyz", "0.1.0+12 3"])
def test_text_without_an_engine_is_not_an_identity(tmp_path, text):
    (tmp_path / "VERSION").write_text(text)
    assert identity.installed_identity(str(tmp_path / "VERSION")) is None


def test_identity_is_the_version_of_the_collection_with_the_hash_of_the_engine(tmp_path):
    engine = small_engine(tmp_path / "plugins" / "module_utils")
    assert identity.source_identity(str(engine)).version == identity.UNKNOWN_VERSION
    (tmp_path / "galaxy.yml").write_text("namespace: a\nversion: 1.2.3\n")
    found = identity.source_identity(str(engine))
    assert found.text == f"1.2.3+{found.engine[:12]}" and len(found.engine) == 64
    (tmp_path / "MANIFEST.json").write_text('{"collection_info": {"version": "1.2.4-rc1"}}')
    assert identity.source_identity(str(engine)).text == f"1.2.4-rc1+{found.engine[:12]}"
    assert identity.parse_record(found.record) == found
    released = re.search(r"(?m)^version: (\S+)", (SOURCE.parents[1] / "galaxy.yml").read_text())
    assert identity.identity().version == released.group(1)
