# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Test what runs of ansible-playbook in tests share: payloads of modules, and the compiled code of archives."""

from __future__ import annotations

import marshal
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path

from tests.lab.ansible_playbook import SITE, keep, payload_key, provide


def imported(archive: Path, source: str, compiled: Path) -> str:
    """Import a module with this source from an archive in a separate process; return its output."""
    with zipfile.ZipFile(archive, "w") as packed:
        packed.writestr("shared.py", source)
    program = f"import sys; sys.path.insert(0, {str(archive)!r}); import shared; print(shared.answer())"
    environment = {**os.environ, "PYTHONPATH": str(SITE), "KUBENODE_COMPILED": str(compiled)}
    command = [sys.executable, "-c", program]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()


def test_code_of_archives_is_compiled_once_for_each_source(tmp_path):
    source = "def answer():\n    return answer.__code__.co_filename + {!r}\n"
    compiled = tmp_path / "compiled"
    compiled.mkdir()
    assert imported(tmp_path / "a.zip", source.format(" 1"), compiled) == f"{tmp_path}/a.zip/shared.py 1"
    (kept,) = compiled.iterdir()
    kept.write_bytes(marshal.dumps(compile(source.format(" kept"), "elsewhere", "exec")))
    assert imported(tmp_path / "b.zip", source.format(" 1"), compiled) == f"{tmp_path}/b.zip/shared.py kept"
    assert imported(tmp_path / "b.zip", source.format(" 2"), compiled) == f"{tmp_path}/b.zip/shared.py 2"
    assert len(list(compiled.iterdir())) == 2


def test_payloads_belong_to_the_content_of_the_plugins_and_to_the_version_of_ansible(tmp_path):
    module = tmp_path / "plugins" / "module_utils" / "part.py"
    module.parent.mkdir(parents=True)
    keys = set()
    for text in ("", "x = 1\n"):
        module.write_text(text)
        assert payload_key(tmp_path, "2.19.1") == payload_key(tmp_path, "2.19.1")
        keys |= {payload_key(tmp_path, "2.19.1"), payload_key(tmp_path, "2.19.2")}
    module.rename(module.with_name("other.py"))
    (tmp_path / "meta").mkdir()
    keys.add(payload_key(tmp_path, "2.19.1"))
    (tmp_path / "meta" / "runtime.yml").write_text("plugin_routing: {}\n")
    assert len(keys | {payload_key(tmp_path, "2.19.1")}) == 6


def test_new_payloads_are_kept_and_unused_ones_removed(tmp_path):
    kept, unused = tmp_path / "payloads" / "key", tmp_path / "payloads" / "unused"
    unused.mkdir(parents=True)
    os.utime(unused, (0, time.time() - 2 * 24 * 3600))
    first, second = tmp_path / "first" / "cache", tmp_path / "second" / "cache"
    provide(kept, first)
    for name in ("copy", "copy.lock"):
        (first / name).write_text(name)
    keep(kept, first)
    assert [path.name for path in kept.iterdir()] == ["copy"] and not unused.exists()
    provide(kept, second)
    (second / "stat").write_text("stat")
    keep(kept, second)
    assert (second / "copy").read_text() == "copy" and sorted(path.name for path in kept.iterdir()) == ["copy", "stat"]
