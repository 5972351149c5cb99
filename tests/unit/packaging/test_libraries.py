# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The archive of libraries: the arguments of pip, the packed files, and refusals."""

from __future__ import annotations

import hashlib
import io
import re
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import ConfigurationError
from ansible_collections.kubenode.proxy.plugins.module_utils.controller import libraries
from ansible_collections.kubenode.proxy.plugins.module_utils.controller.libraries import Target
from tests import pins

NODE = Target("3.11", "x86_64")


def test_pip_resolves_for_the_node_and_not_for_the_controller():
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
def test_invalid_targets_and_requirements_are_refused(target, requirements, name):
    with pytest.raises(ConfigurationError, match=name):
        libraries.pip_arguments(target, requirements, "/place")


def test_packed_directory_is_reproducible_and_omits_programs_and_caches(tmp_path):
    for path in ("b/x.py", "a.py", "bin/tool", "b/bin/kept.py", "b/__pycache__/x.pyc"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(path)
    first = libraries.pack_directory(str(tmp_path))
    (tmp_path / "a.py").touch()
    assert libraries.pack_directory(str(tmp_path)) == first
    with tarfile.open(fileobj=io.BytesIO(first)) as archive:
        assert archive.getnames() == ["a.py", "b/bin/kept.py", "b/x.py"]


PINS = Path(__file__).resolve().parents[3] / "roles/agent/files/libraries.txt"


def wheel(place: Path, content: str) -> Path:
    """Return a wheel with the name of a pinned library."""
    path = place / "prometheus_client-0.26.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("prometheus_client/__init__.py", content)
        head = "Metadata-Version: 2.1\nName: prometheus-client\nVersion: 0.26.0\n"
        archive.writestr("prometheus_client-0.26.0.dist-info/METADATA", head)
        tags = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        archive.writestr("prometheus_client-0.26.0.dist-info/WHEEL", tags)
        archive.writestr("prometheus_client-0.26.0.dist-info/RECORD", "")
    return path


def test_a_wheel_that_differs_from_the_pinned_one_is_refused(tmp_path):
    """The name and version match, as from a compromised index or after a swap on the controller."""
    wheels, out = tmp_path / "wheels", tmp_path / "out"
    wheels.mkdir()
    good = hashlib.sha256(wheel(wheels, "good = 1").read_bytes()).hexdigest()
    pins = tmp_path / "pins.txt"
    pins.write_text(f"prometheus-client==0.26.0 --hash=sha256:{good}\n")
    words = libraries.pip_arguments(NODE, [], str(out), str(wheels), str(pins))
    libraries.install(sys.executable, words)
    assert (out / "prometheus_client/__init__.py").read_text() == "good = 1"
    wheel(wheels, "evil = 1")
    words = libraries.pip_arguments(NODE, [], str(tmp_path / "other"), str(wheels), str(pins))
    with pytest.raises(libraries.LibrariesError, match=r"(?i)hash"):
        libraries.install(sys.executable, words)
    assert not (tmp_path / "other").exists()


def test_the_role_pins_every_library_by_version_and_hash():
    entries = re.split(r"(?m)^(?=[A-Za-z])", PINS.read_text())[1:]
    for entry in entries:
        assert re.fullmatch(r"\S+==[0-9.]+( \\\n    --hash=sha256:[0-9a-f]{64})+\n", entry), entry
    # One wheel for all if there is no compiled part; else one for each Python and machine.
    assert sorted(entry.count("--hash") for entry in entries) == [1, len(pins.PYTHONS) * len(pins.MACHINES)]
    assert {"3.9", "3.11", "3.13"} <= set(pins.PYTHONS)


def test_other_pins_give_another_archive():
    names = {libraries.cache_name(NODE, [], [], content) for content in (b"", b"a", b"b")}
    assert len(names) == 3


def test_failure_of_pip_is_one_line(tmp_path):
    (tmp_path / "wheels").mkdir()
    words = libraries.pip_arguments(NODE, ["PyYAML"], str(tmp_path / "out"), str(tmp_path / "wheels"))
    with pytest.raises(libraries.LibrariesError, match=r"^pip on the controller: No matching distribution .* PyYAML"):
        libraries.install(sys.executable, words)


def test_the_name_contains_target_and_requirements():
    names = {
        libraries.cache_name(NODE, ["a", "b"], []),
        libraries.cache_name(NODE, ["b", "a"], []),
        libraries.cache_name(NODE, ["a"], []),
        libraries.cache_name(NODE, ["a"], ["a-1.whl"]),
        libraries.cache_name(Target("3.9", "x86_64"), ["a"], []),
    }
    assert len(names) == 4
