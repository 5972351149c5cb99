# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The file of a task for the next boot: names that no program reads are refused."""

from __future__ import annotations

import re

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import ConfigurationError
from ansible_collections.kubenode.proxy.plugins.module_utils.module_support.own_file import boot_file, own_file

DEFAULT = "/etc/sysctl.d/99-kubenode-proxy.conf"


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("rel.conf", "persistent_file: rel.conf is not an absolute path"),
        ("./etc/sysctl.d/60-web.conf", "persistent_file: ./etc/sysctl.d/60-web.conf is not an absolute path"),
        (
            "/etc/sysctl.d/60-web",
            "persistent_file: /etc/sysctl.d/60-web would not be read at boot: its name does not end in .conf",
        ),
        (
            "/etc/sysctl.d/.60-web.conf",
            "persistent_file: /etc/sysctl.d/.60-web.conf would not be read at boot: its name begins with a dot",
        ),
        ("/etc/sysctl.d/", "persistent_file: /etc/sysctl.d/ would not be read at boot: its name does not end in .conf"),
    ],
)
def test_files_that_no_program_reads_are_refused(path: str, words: str) -> None:
    parameters = {"persistent_file": path, "profile": None}
    with pytest.raises(ConfigurationError, match=f"^{re.escape(words)}$"):
        own_file(parameters, "profile", DEFAULT, needed=True)
    assert own_file(parameters, "profile", DEFAULT, needed=False) == ""
    with pytest.raises(ConfigurationError, match=r"^parameters_file: "):
        boot_file("parameters_file", path)


def test_the_file_is_the_given_one_or_that_of_the_service_proxy() -> None:
    given = {"persistent_file": "/etc/sysctl.d/60-web.conf", "profile": None}
    assert own_file(given, "profile", DEFAULT, needed=True) == "/etc/sysctl.d/60-web.conf"
    assert own_file({"persistent_file": None, "profile": {"mode": "ipvs"}}, "profile", DEFAULT, needed=True) == DEFAULT
    with pytest.raises(
        ConfigurationError,
        match=r"name a file of the task's own, such as .*, or set persistent: false; .* only for a task with profile",
    ):
        own_file({"persistent_file": None, "profile": None}, "profile", DEFAULT, needed=True)
