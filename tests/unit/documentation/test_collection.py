# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The collection's metadata agrees with its content: documentation, defaults, groups, licences."""

from __future__ import annotations

import importlib
import re

import pytest
from ansible.module_utils import basic
from ansible.release import __version__ as ansible_version

from tests.conftest import ROOT
from tests.documentation import collection, session
from tests.documentation.__main__ import generated, stale
from tests.documentation.markup import cell, markdown, value

ROLES = collection.roles()
SUPPORT = {"action_group", "check_mode", "diff_mode", "idempotent", "platform"}
CODE = (
    "plugins/**/*.py",
    "tests/**/*.py",
    "roles/**/*.yml",
    "playbooks/*.yml",
    "meta/*.yml",
    "examples/**/*.yml",
    "extensions/**/*.py",
    "extensions/**/*.yml",
    ".ci/*",
)


@pytest.fixture(scope="module")
def modules():
    """Provide the output of ansible-doc for each module."""
    return collection.modules()


same_words = pytest.mark.skipif(
    tuple(map(int, ansible_version.split(".")[:2])) < (2, 19),
    reason="the page of the inventory plugin has options of ansible-core, which words them differently before 2.19",
)


@same_words
def test_generated_files_are_up_to_date():
    assert stale() == [], "run make docs"


@same_words
def test_an_outdated_file_is_noticed(monkeypatch):
    files = generated()
    page = next(iter(files))
    monkeypatch.setattr("tests.documentation.__main__.generated", lambda root: {**files, page: files[page] + "more\n"})
    assert stale() == [str(page)]


def test_modules_document_what_they_support(modules):
    missing = {name: SUPPORT - set(found["doc"].get("attributes") or {}) for name, found in modules.items()}
    assert {name: absent for name, absent in missing.items() if absent} == {}


def test_modules_document_their_action_groups(modules):
    groups = collection.runtime()["action_groups"]
    for name, found in modules.items():
        own = [f"kubenode.proxy.{group}" for group, members in groups.items() if name in members]
        attribute = found["doc"]["attributes"]["action_group"]
        assert (attribute["membership"], attribute["support"]) == (own, "full" if own else "none"), name


GROUP_OPTIONS = {
    "kubernetes_api": {"kubeconfig", "context", "host", "api_key", "ca_cert", "validate_certs", "api_timeout"},
    "convergence": {"lock_timeout", "state_directory", "diff_lines"},
    "history": {"history_directory"},
    "state": {"state_directory"},
}


def test_the_options_of_each_action_group_are_known():
    assert set(collection.runtime()["action_groups"]) == set(GROUP_OPTIONS)


@pytest.mark.parametrize(("group", "options"), GROUP_OPTIONS.items())
def test_all_modules_of_an_action_group_have_its_options(modules, group, options):
    members = collection.runtime()["action_groups"][group]
    assert sorted(members) == sorted(name for name, item in modules.items() if options <= set(item["doc"]["options"]))


def test_modules_have_a_version_and_an_author(modules):
    for name, found in modules.items():
        assert re.fullmatch(r"\d+\.\d+\.\d+", found["doc"].get("version_added", "")), name
        assert found["doc"]["author"], name


class _Specified(Exception):
    """Raised in place of a run of a module, with its argument specification."""


def _specification(monkeypatch, name):
    """Return the argument specification of a module; empty if an action plugin runs in its place."""

    def capture(_self, argument_spec, **_others):
        raise _Specified(argument_spec)

    module = importlib.import_module(f"ansible_collections.kubenode.proxy.plugins.modules.{name}")
    if not hasattr(module, "main"):
        return {}
    with monkeypatch.context() as patch, pytest.raises(_Specified) as specified:
        patch.setattr(basic.AnsibleModule, "__init__", capture)
        module.main()
    return specified.value.args[0]


def _values(options, nested, path=""):
    """Return defaults and choices of options by path; ``nested``: the field with the options of a dictionary."""
    found = {}
    for name, option in options.items():
        if option.get("default") is not None:
            found[f"{path}{name}: default"] = option["default"]
        if option.get("choices"):
            found[f"{path}{name}: choices"] = list(option["choices"])
        found.update(_values(option.get(nested) or {}, nested, f"{path}{name}."))
    return found


def test_documented_defaults_and_choices_are_those_of_the_code(modules, monkeypatch):
    differing = {}
    for name, item in modules.items():
        specified = _values(_specification(monkeypatch, name), "options")
        documented = _values(item["doc"].get("options") or {}, "suboptions")
        if specified and specified != documented:
            differing[name] = set(map(str, specified.items())) ^ set(map(str, documented.items()))
    assert differing == {}


def _undocumented(results, path=""):
    """Yield return values without a description, a type, a condition or a sample."""
    for key, item in results.items():
        for field in ("description", "type"):
            if not item.get(field):
                yield f"{path}{key}: no {field}"
        if not path and not item.get("returned"):
            yield f"{path}{key}: not said when it is returned"
        if not path and "sample" not in item and "contains" not in item:
            yield f"{path}{key}: no sample"
        yield from _undocumented(item.get("contains") or {}, f"{path}{key}.")


def test_results_are_documented(modules):
    assert {name: list(_undocumented(found["return"] or {})) for name, found in modules.items()} == {
        name: [] for name in modules
    }


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role.name)
def test_specified_variables_agree_with_defaults(role):
    specified = {}
    for entry_point in role.entry_points.values():
        specified.update(entry_point.get("options") or {})
    assert set(role.defaults) == set(specified)
    differing = {
        name: (option.get("default"), role.defaults[name])
        for name, option in specified.items()
        if option.get("default") != role.defaults[name]
    }
    assert differing == {}


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role.name)
def test_roles_are_described(role):
    readme = (role.directory / "README.md").read_text(encoding="utf-8")
    absent = [name for name in role.defaults if f"`{name}`" not in readme]
    assert absent == []
    assert (role.directory / "meta" / "main.yml").exists()
    assert all(name.startswith(f"{role.name}_") for name in role.defaults)


def test_every_role_can_be_reverted():
    for role in ROLES:
        assert f"{role.name}_state" in role.defaults, role.name


def test_playbooks_are_in_the_readme():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [name for name in collection.playbook_names() if f"kubenode.proxy.{name}" not in readme] == []


def test_inventory_plugins_have_a_version_and_an_author_and_are_in_the_readme():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for name, found in collection.inventories().items():
        assert found["doc"]["author"] and re.fullmatch(r"\d+\.\d+\.\d+", found["doc"]["version_added"]), name
        assert f"kubenode.proxy.{name}" in readme


def test_roles_are_in_the_readme():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [role.name for role in ROLES if f"`{role.name}`](roles/{role.name}/README.md)" not in readme] == []


def test_make_targets_are_in_the_instructions():
    rules = re.findall(r"(?m)^([a-z][a-z -]*):", (ROOT / "Makefile").read_text(encoding="utf-8"))
    targets = [target for rule in rules for target in rule.split()]
    text = (ROOT / "docs/dev/testing.md").read_text(encoding="utf-8")
    hidden = {"help", "setup-demo", "setup-lab", "test"}
    assert [target for target in targets if target not in hidden and f"`make {target}`" not in text] == []


def test_every_file_has_a_licence():
    paths = [path for pattern in CODE for path in ROOT.glob(pattern) if path.is_file() and path.stat().st_size]
    paths = [path for path in paths if "cases" not in str(path.relative_to(ROOT)) and "__pycache__" not in path.parts]
    assert len(paths) > 100
    bare = [
        str(path.relative_to(ROOT))
        for path in paths
        if "SPDX-License-" + "Identifier: GPL-3.0-or-later" not in path.read_text(encoding="utf-8")[:600]
    ]
    assert bare == []


def test_semantic_markup_becomes_markdown():
    text = r"See O(kubenode.proxy.service_proxy#module:snapshot), V(a\)b), M(kubenode.proxy.sysctls) and RV(drift)."
    assert markdown(text) == "See `snapshot`, `a)b`, [`kubenode.proxy.sysctls`](modules/sysctls.md) and `drift`."
    assert cell(["One | two.", "Three."]) == r"One \| two. Three."
    assert value({"a": True}) == '`{"a": true}`' and value("") == '`""`'


def test_a_session_becomes_a_picture():
    recording = "=== One\nprepared in 1 s\n$ command\nincluded: x\n+added <&>\n\n=== Two\nomitted\n"
    extract = session.excerpt(recording, {"One": 2})
    assert extract == "=== One\n$ command\n[1 more lines]\n"
    assert session.excerpt(recording, {"One": 3}) == "=== One\n$ command\n+added <&>\n"
    picture = session.picture(session.excerpt(recording, {"One": 9}), "a title")
    assert picture.startswith("<svg ") and "+added &lt;&amp;&gt;" in picture and "omitted" not in picture
    with pytest.raises(ValueError, match="Three"):
        session.excerpt(recording, {"Three": 2})
