# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The archive of libraries: what pip is asked, what is packed, what is refused."""

from __future__ import annotations

import io
import sys
import tarfile

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.controller import libraries
from ansible_collections.kubenode.proxy.plugins.module_utils.controller.libraries import Target
from ansible_collections.kubenode.proxy.plugins.module_utils.errors import ConfigurationError

NODE = Target("3.11", "x86_64")


def test_pip_is_asked_for_the_node_and_not_for_the_controller():
    words = libraries.pip_arguments(NODE, ["kubernetes>=28,<40", "PyYAML"], "/place")
    assert words[words.index("--python-version") + 1] == "3.11"
    assert "manylinux2014_x86_64" in words and "--only-binary=:all:" in words
    assert words[-3:] == ["--", "PyYAML", "kubernetes>=28,<40"]
    assert "--no-index" not in words


def test_wheelhouse_means_no_index():
    words = libraries.pip_arguments(NODE, ["PyYAML"], "/place", "/wheels")
    assert words[words.index("--find-links") + 1] == "/wheels" and "--no-index" in words


@pytest.mark.parametrize(
    ("target", "requirements", "name"),
    [
        (Target("2.7", "x86_64"), [], "python_version"),
        (Target("3.11\n", "x86_64"), [], "python_version"),
        (Target("3.11", "../x"), [], "machine"),
        (NODE, ["--index-url=http://example.invalid"], "requirements"),
        (NODE, ["name @ https://example.invalid/x.whl"], "requirements"),
        (NODE, ["./local"], "requirements"),
    ],
)
def test_what_is_not_a_target_or_a_requirement_is_refused(target, requirements, name):
    with pytest.raises(ConfigurationError, match=name):
        libraries.pip_arguments(target, requirements, "/place")


def test_packed_directory_is_reproducible_and_leaves_out_programs_and_caches(tmp_path):
    for path in ("b/x.py", "a.py", "bin/tool", "b/bin/kept.py", "b/__pycache__/x.pyc"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(path)
    first = libraries.pack_directory(str(tmp_path))
    (tmp_path / "a.py").touch()
    assert libraries.pack_directory(str(tmp_path)) == first
    with tarfile.open(fileobj=io.BytesIO(first)) as archive:
        assert archive.getnames() == ["a.py", "b/bin/kept.py", "b/x.py"]


def test_failure_of_pip_is_one_line(tmp_path):
    (tmp_path / "wheels").mkdir()
    words = libraries.pip_arguments(NODE, ["PyYAML"], str(tmp_path / "out"), str(tmp_path / "wheels"))
    with pytest.raises(libraries.LibrariesError, match=r"^pip on the controller: No matching distribution .* PyYAML"):
        libraries.install(sys.executable, words)


def test_name_tells_target_and_requirements():
    names = {
        libraries.cache_name(NODE, ["a", "b"], []),
        libraries.cache_name(NODE, ["b", "a"], []),
        libraries.cache_name(NODE, ["a"], []),
        libraries.cache_name(NODE, ["a"], ["a-1.whl"]),
        libraries.cache_name(Target("3.9", "x86_64"), ["a"], []),
    }
    assert len(names) == 4
