# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Conversion of Ansible's semantic markup to Markdown."""

from __future__ import annotations

import json
import re
from typing import Any, Iterable, Union

from .collection import NAME

_MARK = re.compile(r"\b(O|V|RV|E|C|I|B|M|P|U|L|R)\(((?:[^()\\]|\\.|\([^()]*\))*)\)")


def _replace(match: re.Match[str], above: str) -> str:
    kind, text = match.group(1), re.sub(r"\\(.)", r"\1", match.group(2))
    if kind in ("O", "RV"):
        # kubenode.proxy.service_proxy#module:snapshot is the option snapshot of another module.
        text = text.rpartition(":")[2] if "#" in text else text
        return f"`{text}`"
    if kind in ("V", "E", "C"):
        return f"`{text}`"
    if kind in ("M", "P"):
        name, _hash, what = text.partition("#")
        short = name[len(NAME) + 1 :]
        if not name.startswith(f"{NAME}."):
            return f"`{name}`"
        if what == "role":
            return f"[`{name}`]({above}../roles/{short}/README.md)"
        return f"[`{name}`]({above}modules/{short}.md)"
    if kind in ("L", "R"):
        label, _comma, target = (part.strip() for part in text.partition(","))
        return f"[{label}]({target})" if kind == "L" else label
    return {"I": f"*{text}*", "B": f"**{text}**", "U": f"<{text}>"}[kind]


def markdown(text: str, above: str = "") -> str:
    """Convert semantic markup to Markdown; ``above`` is the path from the page to the directory docs."""
    return _MARK.sub(lambda match: _replace(match, above), text)


def cell(text: Union[str, Iterable[str], None], above: str = "") -> str:
    """Return one or several sentences as a table cell."""
    parts: list[str] = [text] if isinstance(text, str) else list(text or ())
    return " ".join(markdown(part.strip(), above) for part in parts).replace("|", "\\|").replace("\n", " ")


def value(content: Any) -> str:
    """Return a default, choice or sample in code font, as it is written in YAML's flow style."""
    if content == "":
        return '`""`'
    text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
    return "`" + text.replace("|", "\\|").replace("\n", " ") + "`"
