# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Completion scripts of the node command for bash and zsh, generated from its parser."""

from __future__ import annotations

from typing import Mapping, Sequence

from ..base.mode_names import AUTO, IPTABLES, MODES

_CHOICES = {"--mode": " ".join((*MODES, AUTO)), "--output": "text json", "--fallback": IPTABLES}


def script(shell: str, words: Mapping[str, Sequence[str]]) -> str:
    """Return the script for ``bash`` or ``zsh``. ``words``: commands and the options of each."""
    body = _bash(words)
    return body if shell == "bash" else f"autoload -U +X bashcompinit && bashcompinit\n{body}"


def _bash(words: Mapping[str, Sequence[str]]) -> str:
    lines: list[str] = [
        "_kubenode_proxy() {",
        '  local current="${COMP_WORDS[COMP_CWORD]}" previous="${COMP_WORDS[COMP_CWORD-1]}" options=""',
        "  COMPREPLY=()",
        '  case "$previous" in',
    ]
    for option, choices in _CHOICES.items():
        lines.append(f'    {option}) COMPREPLY=($(compgen -W "{choices}" -- "$current")); return ;;')
    lines += [
        "    check-configuration|--config|--kubeconfig|--snapshot|--cache|--control|--state-directory)",
        '      COMPREPLY=($(compgen -f -- "$current")); return ;;',
        "  esac",
        '  if [ "$COMP_CWORD" -eq 1 ]; then',
        f'    COMPREPLY=($(compgen -W "{" ".join(words)}" -- "$current")); return',
        "  fi",
        '  case "${COMP_WORDS[1]}" in',
    ]
    for command, options in words.items():
        extra = "bash zsh " if command == "completion" else ""
        lines.append(f'    {command}) options="{extra}{" ".join(options)}" ;;')
    lines += [
        "  esac",
        '  COMPREPLY=($(compgen -W "$options" -- "$current"))',
        "}",
        "complete -F _kubenode_proxy kubenode-proxy",
    ]
    return "\n".join(lines) + "\n"
