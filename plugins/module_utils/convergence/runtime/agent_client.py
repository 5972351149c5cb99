# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The client of the agent's control socket: one line of JSON to the agent, one line of JSON back."""

from __future__ import annotations

import errno
import json
import socket
import time
from typing import Any, ContextManager

from ...base.errors import ProxyError, UnknownDestination, errors_as
from ...base.regular_files import parse_json

#: Limit of an answer in bytes: the explanation of a Service with 100,000 endpoints takes about 20 MB.
_MOST_ANSWER_BYTES = 64 << 20
#: How long the agent waits for a client's line, in seconds.
CLIENT_SECONDS = 5.0
#: How long an answer may take, in seconds.
ANSWER_SECONDS = 30.0
#: The question with which the agent reads its configuration again. The answer shows whether it is in effect.
RELOAD = "reload"
#: The question for the addresses of all endpoints that the agent knows, except those that terminate.
ENDPOINTS = "endpoints"

#: What reading an answer of another form than expected may raise.
_OTHER_FORM = (LookupError, TypeError, ValueError, AttributeError, OverflowError)

Question = dict[str, Any]
Answer = dict[str, Any]


class NoAgent(ProxyError):
    """No agent is running on this node, or it is not listening."""


class AgentBusy(ProxyError):
    """The agent has not answered in time. It may still do what was requested."""


#: The codes of errors that a client distinguishes; other errors have none.
_CODES: dict[str, type[ProxyError]] = {"busy": AgentBusy, "unknown-destination": UnknownDestination}


def error_answer(error: ProxyError) -> Answer:
    """Return the answer from which :func:`ask_agent` raises an error of the same class, if it has a code."""
    code = next((name for name, kind in _CODES.items() if isinstance(error, kind)), "")
    return {"error": str(error), "code": code}


#: The answer for a client whose question the agent's loop has not reached in time.
BUSY: Answer = error_answer(AgentBusy(f"the agent is busy and did not answer within {ANSWER_SECONDS:g} seconds"))


def ask_agent(path: str, question: Question) -> Answer:
    """Send a question to the agent that listens at ``path``, and return its answer without control characters.

    The caller may be root while the agent is not, so the answer of a compromised agent must be harmless: its length,
    its nesting and the time that it may take are limited. Raises NoAgent if no agent is running, AgentBusy,
    UnknownDestination, ProxyError.
    """
    try:
        data = _ask(path, json.dumps(question).encode() + b"\n")
    except (socket.timeout, BlockingIOError) as error:
        # Only one question is answered at a time, and some clients can wait (unix(7): EAGAIN).
        raise AgentBusy(f"{path}: {BUSY['error']}") from error
    except PermissionError as error:
        raise ProxyError(f"{path}: permission denied: run this as root") from error
    except OSError as error:
        raise NoAgent(f"{path}: no agent answers: {error.strerror or error}") from error
    try:
        answer = _printable(parse_json(data))
    except (ValueError, RecursionError) as error:
        raise ProxyError(f"{path}: the agent's answer is not valid") from error
    if not isinstance(answer, dict):
        raise ProxyError(f"{path}: the agent's answer is not an object")
    if "error" in answer:
        raise _CODES.get(str(answer.get("code")), ProxyError)(str(answer["error"]))
    return answer


def reading_answer(about: str = "", kind: type[ProxyError] = ProxyError) -> ContextManager[None]:
    """Raise an error of ``kind`` if the ``with`` statement meets another form of answer than it expects.

    ``about``: what the question was about.
    """
    what = f"the agent's answer{about and f' about {about}'} is not valid"
    return errors_as(kind, what, *_OTHER_FORM)


def _ask(path: str, question: bytes) -> bytes:
    """Return the agent's answer, one line. Raises OSError, including for a line that is too long or late."""
    deadline = time.monotonic() + ANSWER_SECONDS + CLIENT_SECONDS
    data = bytearray()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as sock:
        sock.settimeout(ANSWER_SECONDS + CLIENT_SECONDS)
        sock.connect(path)
        sock.sendall(question)
        while not data.endswith(b"\n"):
            sock.settimeout(max(0.001, deadline - time.monotonic()))
            part = sock.recv(65536)
            if not part:
                break
            data += part
            if len(data) > _MOST_ANSWER_BYTES:
                raise OSError(errno.EFBIG, f"the answer is larger than {_MOST_ANSWER_BYTES} bytes")
    return bytes(data)


def _printable(value: Any) -> Any:
    """Return a JSON value with a question mark for each character of its texts that cannot be printed.

    Tabs, with which nft indents rules, become spaces.
    """
    if isinstance(value, str):
        return "".join(character if character.isprintable() else "?" for character in value.expandtabs())
    if isinstance(value, list):
        return [_printable(item) for item in value]
    if isinstance(value, dict):
        return {_printable(key): _printable(item) for key, item in value.items()}
    return value
