# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The zip application with bytecode: written by the role's own command, used by its Python, and renewed when stale."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

from ansible_collections.kubenode.proxy.plugins.module_utils.packaging import archive, bytecode

ROOT = Path(__file__).resolve().parents[3]
ENGINE = ROOT / "plugins" / "module_utils"
#: Import the command, and print which of the engine's modules were compiled and what the engine says of itself.
IMPORTED = """\
import builtins, importlib._bootstrap_external as machinery, sys, zipimport
compiled, original = [], zipimport._compile_source
zipimport._compile_source = lambda path, source: compiled.append(path) or original(path, source)
sys.path.insert(0, sys.argv[1])
from kubenode_proxy.command import cli
from kubenode_proxy.packaging.identity import identity
from kubenode_proxy.packaging.running import running_files
print(len(compiled), identity().record, len(running_files()), cli.main.__code__.co_filename)
"""


@pytest.fixture(scope="module")
def packed() -> archive.Archive:
    return archive.pack(str(ENGINE))


@pytest.fixture
def source(tmp_path: Path, packed: archive.Archive) -> Path:
    path = tmp_path / "source.pyz"
    path.write_bytes(packed.content)
    return path


@pytest.fixture
def installed(source: Path) -> Path:
    path = source.parent / "kubenode-proxy.pyz"
    assert compile_engine(source, path) == "changed"
    return path


def compile_engine(source: Path, path: Path, *options: str) -> str:
    """Run the role's command, and return its answer."""
    command = yaml.safe_load((ROOT / "roles/agent/vars/main.yml").read_text(encoding="utf-8"))["__agent_compile"]
    values = {"{{ agent_python }}": sys.executable, "{{ __agent_source }}": source, "{{ __agent_archive }}": path}
    words = [str(values.get(word, word)) for word in command]
    return subprocess.run([*words, *options], capture_output=True, text=True, check=True, cwd="/").stdout.strip()


def imported(path: Path) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-I", "-B", "-c", IMPORTED, path], capture_output=True, text=True, check=True
    )
    return done.stdout.split()


def test_nothing_is_compiled_at_the_start(packed: archive.Archive, source: Path, installed: Path) -> None:
    compiled, record, files, place = imported(installed)
    assert (compiled, record) == ("0", packed.identity.record)
    assert place == f"{installed}/kubenode_proxy/command/cli.py"
    slow = imported(source)
    assert int(slow[0]) > 5 and slow[1:3] == [record, files]
    command = [sys.executable, "-I", "-B", str(installed), "--version"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert packed.identity.text in done.stdout


def test_every_module_has_bytecode_and_its_source(packed: archive.Archive, installed: Path) -> None:
    with zipfile.ZipFile(installed) as found:
        names = set(found.namelist())
        assert found.testzip() is None
    sources = {name for name in names if name.endswith(".py")}
    assert names == sources | {f"{name}c" for name in sources} | {"kubenode_proxy/VERSION"}
    assert installed.read_bytes().startswith(b"#!/usr/bin/python3\n")
    assert installed.stat().st_mode & 0o7777 == 0o644
    assert sorted(path.name for path in installed.parent.iterdir()) == ["kubenode-proxy.pyz", "source.pyz"]


def test_a_second_run_changes_nothing(source: Path, installed: Path) -> None:
    before = installed.stat()
    assert compile_engine(source, installed) == "unchanged"
    after = installed.stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_check_mode_reports_and_writes_nothing(source: Path, installed: Path) -> None:
    assert compile_engine(source, installed, "--check") == "unchanged"
    installed.unlink()
    assert compile_engine(source, installed, "--check") == "changed"
    assert not installed.exists()


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "spoil",
    [
        damage,
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(path.with_name("source.pyz").read_bytes()),
        lambda path: path.chmod(0o666),
        lambda path: path.rename(path.with_name("other")) and path.symlink_to("other"),
    ],
    ids=["damaged", "empty", "without-bytecode", "writable-by-others", "link"],
)
def test_another_content_is_replaced(source: Path, installed: Path, spoil) -> None:
    before = installed.read_bytes()
    spoil(installed)
    assert compile_engine(source, installed) == "changed"
    assert not installed.is_symlink() and installed.stat().st_mode & 0o7777 == 0o644
    assert len(installed.read_bytes()) == len(before)
    assert compile_engine(source, installed) == "unchanged"


def test_another_engine_replaces_the_old_one(tmp_path: Path, source: Path, installed: Path) -> None:
    content = archive.pack(str(ENGINE), "/opt/python/bin/python3").content
    source.write_bytes(content)
    assert compile_engine(source, installed) == "changed"
    assert installed.read_bytes().startswith(b"#!/opt/python/bin/python3\n")


def test_bytecode_of_another_python_is_ignored_and_then_renewed(
    packed: archive.Archive, source: Path, installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = bytes([importlib.util.MAGIC_NUMBER[0] ^ 1]) + importlib.util.MAGIC_NUMBER[1:]
    monkeypatch.setattr(importlib.util, "MAGIC_NUMBER", other)
    installed.write_bytes(bytecode.with_bytecode(packed.content, str(installed)))
    assert bytecode.is_current(packed.content, str(installed))
    found = imported(installed)
    assert int(found[0]) > 5 and found[1] == packed.identity.record
    assert compile_engine(source, installed) == "changed"
    assert imported(installed)[0] == "0"


def test_a_failure_is_one_line_and_keeps_the_file(tmp_path: Path, installed: Path, capsys) -> None:
    before = installed.read_bytes()
    (tmp_path / "text").write_text("not an archive")
    assert bytecode.main([str(tmp_path / "none"), str(installed)]) == 1
    assert bytecode.main([str(tmp_path / "text"), str(installed)]) == 1
    assert installed.read_bytes() == before
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and all(line.startswith(f"{installed}: ") for line in lines)
