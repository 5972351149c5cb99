# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Text of the cluster or of a node reaches Ansible through the border only: what playbooks and plugins may contain."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = ("roles", "playbooks", "extensions", "examples")
#: Filters and operators that make new text, which is not marked as data if the variable came from hostvars.
NEW_TEXT = r"from_json|from_yaml|b64decode|urldecode|regex_|replace\(|join\(|split\(|format\(|to_json|\| *string|~"
#: Keywords whose values are templated again when they are used.
KEPT = re.compile(r"(ansible\.builtin\.)?(loop|with_.*|set_fact|add_host|group_by|include_vars)")
INCLUDING = re.compile(r"ansible\.builtin\.(include|import)_(role|tasks)")
ONLY_OF_AN_EVENT = re.compile(r"\s*(\{\{(?:(?!\}\}).)*\bevents?\b(?:(?!\}\}).)*\}\}\s*)+")
BLOCK = re.compile(r"(?:^(?: {4}.*)?\n)+", re.MULTILINE)
NUMBERS = re.compile(r"\{\{ event\.agent_event\.count \}\}")


def sources():
    """Yield the places and parsed documents of all YAML that users run or copy."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.yml")):
            yield str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for block in BLOCK.findall(path.read_text(encoding="utf-8")):
            yield str(path.relative_to(ROOT)), block
    for path in [*(ROOT / "plugins").rglob("*.py"), *(ROOT / "extensions").rglob("*.py")]:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "EXAMPLES":
                yield f"{path.relative_to(ROOT)} EXAMPLES", ast.literal_eval(node.value)


class Loader(yaml.SafeLoader):
    """Reads tags of Ansible as the text that they have."""


Loader.add_multi_constructor("!", lambda loader, suffix, node: str(node.value))


def documents():
    for place, text in sources():
        try:
            yield from [(place, found) for found in yaml.load_all(text, Loader)]
        except yaml.YAMLError:
            # Other blocks of pages are commands and output.
            assert place.endswith(".md")


DOCUMENTS = list(documents())


def mappings(value):
    if isinstance(value, dict):
        yield value
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from mappings(item)


def strings(value):
    if isinstance(value, str):
        yield value
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from strings(item)


def unmarked(task):
    """Return the strings of a task that make new text of hostvars which is then templated again."""
    kept = [value for key, value in task.items() if KEPT.fullmatch(str(key))]
    used = " ".join(strings(kept))
    kept += [value for name, value in (task.get("vars") or {}).items() if re.search(rf"\b{re.escape(name)}\b", used)]
    found = [text for text in strings(kept) if "hostvars" in text and re.search(NEW_TEXT, text)]
    # Wherever it is: the next user of the variable may be a loop.
    return found or [
        text for text in strings(task) if "hostvars" in text and re.search("from_(json|yaml)|b64decode", text)
    ]


def unprotected(ruleset):
    """Return the values of the actions of a ruleset that are entirely text of an event."""
    actions = [rule.get("action") or rule.get("actions") for rule in ruleset.get("rules") or ()]
    return [text for text in strings(actions) if ONLY_OF_AN_EVENT.fullmatch(text) and not NUMBERS.fullmatch(text)]


def test_nothing_that_has_lost_its_mark_is_templated_again():
    assert len(DOCUMENTS) > 100
    found = {(place, text) for place, document in DOCUMENTS for task in mappings(document) for text in unmarked(task)}
    assert found == set()


def test_no_value_of_a_rulebook_is_entirely_text_of_an_event():
    rulesets = [
        (place, item)
        for place, document in DOCUMENTS
        for item in mappings(document)
        if "rules" in item and "sources" in item
    ]
    assert len(rulesets) >= 3
    assert {place: unprotected(ruleset) for place, ruleset in rulesets if unprotected(ruleset)} == {}


@pytest.mark.parametrize(
    "task",
    [
        {"loop": "{{ hostvars[item].answer.stdout | from_json }}"},
        {
            "loop": "{{ found }}",
            "vars": {"found": "{% for h in hosts %}{{ hostvars[h].a ~ hostvars[h].b }}{% endfor %}"},
        },
        {"ansible.builtin.set_fact": {"a": "{{ hosts | map('extract', hostvars, 'a') | join(', ') }}"}},
        {"ansible.builtin.debug": {"msg": "{{ (hostvars.a.stdout | from_json).x }}"}},
    ],
)
def test_a_lost_mark_is_noticed(task):
    assert unmarked(task)


@pytest.mark.parametrize(
    "text", ["{{ event.agent_event.note }}", " {{event.a}}{{ event.b | trim }} ", "{{ events.m_0.a }}"]
)
def test_a_text_of_an_event_alone_is_noticed(text):
    assert unprotected({"rules": [{"action": {"run_module": {"module_args": {"body": {"text": text}}}}}]})


def test_no_default_of_a_role_reads_hostvars():
    """A default is a template wherever it is used; text of a host must reach it with the mark that it is data."""
    defaults = [document for place, document in DOCUMENTS if re.fullmatch(r"roles/\w+/defaults/main\.yml", place)]
    assert len(defaults) == 4
    assert [text for text in strings(defaults) if "hostvars" in text] == []


def test_no_default_hides_an_error_in_what_a_role_is_passed():
    """A default also replaces a value that was passed and cannot be evaluated; so the check of it would never run."""
    own = [document for place, document in DOCUMENTS if place.startswith(("roles/", "playbooks/"))]
    tasks = [task for document in own for task in mappings(document)]
    including = [task for task in tasks if any(INCLUDING.fullmatch(key) for key in task)]
    passed = {name for task in including for name, value in (task.get("vars") or {}).items() if "{{" in str(value)}
    names = {name for name in passed if name.startswith("__")}
    assert {"__service_proxy_accounts", "__kernel_reads", "__agent_kubelet_served"} <= names
    texts = {text for task in tasks for text in strings(task)}
    hidden = {text for text in texts if any(re.search(rf"\b{name} *\| *d(efault)?\(", text) for name in names)}
    assert hidden == set()


def test_only_the_border_decides_what_is_evaluated():
    """A second function that looks for delimiters or names would decide otherwise than the border."""
    words = re.compile(r"wrap_var|AnsibleUnsafe|jinja2|[Tt]rusted?_?[Aa]s|literal_eval|ANSIBLE_VAULT|\\\{|ungrouped")
    found = {}
    for path in (*(ROOT / "plugins").rglob("*.py"), *(ROOT / "extensions").rglob("*.py")):
        used = set(words.findall(path.read_text(encoding="utf-8")))
        if used:
            found[path.name] = used
    # The page is made of a template of the collection, which gets texts of nodes as values only.
    assert found.pop("page.py") == {"jinja2"}
    assert set(found) == {"border.py", "nodes.py"} and found["nodes.py"] == {"wrap_var"}
