# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Texts that Ansible or ansible-rulebook would evaluate, and texts that must arrive unchanged."""

from __future__ import annotations

#: Replaces an expression that leaves a trace when it is evaluated. It has double quotes only.
ACTION = "ACTION"
_HEADER = "#jinja2: variable_start_string:'[%', variable_end_string:'%]'\n[% ACTION %]"
_QUOTED_HEADER = _HEADER.replace("'", "\\x27").replace("\n", "\\n")
#: What ansible-core itself evaluates, in every version.
TEMPLATES: dict[str, str] = {
    "variable": "{{ ACTION }}",
    "variable without blanks": "{{ACTION}}",
    "whitespace control": "a {{- ACTION -}} b",
    "several braces": "{{{ACTION: 1}}}",
    "statement": "{% if ACTION %}{% endif %}",
    "statement over lines": "{%\nif ACTION %}{%endif%}",
    "comment first": "{# a #}{{ ACTION }}",
    "header": _HEADER,
    "header with statements": "#jinja2:block_start_string:'<<',block_end_string:'>>'\n<< if ACTION >><< endif >>",
}
#: What is evaluated by some versions, or once it has lost its beginning.
RARE: dict[str, str] = {
    "line statements": "#jinja2: line_statement_prefix:'%%', comment_start_string:'!!'\n%% if ACTION\n%% endif\n!!",
    "header after blanks": f" \t{_HEADER}",
    "header after a newline": f"\n{_HEADER}",
    "header after a byte order mark": f"\ufeff{_HEADER}",
    "header without its first character": _HEADER[1:],
    "header in capitals": _HEADER.replace("jinja2", "JINJA2"),
    "header, then braces": "#jinja2: trim_blocks:True\n{{ ACTION }}",
    "vault": "$ANSIBLE_VAULT;1.1;AES256\n3134",
}
#: What ansible-rulebook takes for a literal of Python, which is a template.
LITERALS: dict[str, str] = {
    "hexadecimal": r"'\x7b\x7b ACTION \x7d\x7d'",
    "octal": r"'\173\173 ACTION \175\175'",
    "16 bits": r"'\u007b\u007b ACTION \u007d\u007d'",
    "32 bits": r"'\U0000007b\U0000007b ACTION \U0000007d\U0000007d'",
    "by name": r"'\N{LEFT CURLY BRACKET}\N{LEFT CURLY BRACKET} ACTION }}'",
    "one of each": r"'{\x7b ACTION }}'",
    "statement in a literal": r"'\x7b% if ACTION %}\x7b% endif %}'",
    "continued line": "'{\\\n{ ACTION }}'",
    "one string after the other": "'{' '{ ACTION }}'",
    "strings with a comment between": "('{' # a 'b\n '{ ACTION }}')",
    "strings with prefixes": "r'{'u'{ ACTION }}'",
    "long string": r"'''\x7b\x7b ACTION \x7d\x7d'''",
    "after a newline": "\n" + r"'\x7b\x7b ACTION \x7d\x7d' # a",
    "list": r"['a', '\x7b\x7b ACTION \x7d\x7d', 1]",
    "mapping": r"{'a': {'b': ['\x7b\x7b ACTION \x7d\x7d']}}",
    "header in a literal": f"'{_QUOTED_HEADER}'",
    "header with an escape": "'" + r"\x23" + f"{_QUOTED_HEADER[1:]}'",
    "header in two strings": f"'#jin' '{_QUOTED_HEADER[4:]}'",
}
#: As rulebooks have a text: alone, between quotes, in a list, in others.
VALUES = (
    "{{ text }}",
    "'{{ text }}'",
    '"{{ text }}"',
    "['{{ text }}']",
    "{{ text }}{{ text }}",
    "Note: {{ text }}",
    "{{ text | lower }}",
)
HARMLESS = (
    *("", "a", "123", "True", "null", "1e5", "0x10", "~", "-", "*", "!vault", "&a", "%", "@", "`", "'a'", '"a"'),
    *("{}", "{a}", "${HOME}", '{"a": {"b": [1, {}]}}', "{ { a } }", "} }", "}}", "%}", "50% {x}", "%d {0}", "[% a %]"),
    *(
        '{"a": "{\\"b\\": {\\"c\\": 1}}"}',
        "is '{a}' and \"{b}\"",
        "C#",
        "#1",
        "# a comment",
        "jinja2",
        "a jinja2:3",
    ),
    *(
        r"C:\users\name",
        r"^a\d+$",
        r"a\nb",
        "a\nb",
        "a\tb",
        " a ",
        "ü {ä} 中",
        "$A and $B",
        "ANSIBLE",
        "it's",
        'spec.a: "b"',
    ),
)
