# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""``run``: the agent."""

from __future__ import annotations

import argparse
import os
from typing import TextIO

from ..agent.agent import Agent
from ..agent.settings import AgentOptions
from ..base.errors import ProxyError
from ..base.log import Log
from ..packaging.identity import identity
from .result import FAILED


def run_agent(arguments: argparse.Namespace, errors: TextIO) -> int:
    """Run the agent until it is stopped; return its exit code. Raises ProxyError."""
    named_otherwise = {"configuration": arguments.config, "ignore_findings": tuple(arguments.ignore)}
    others = {name: getattr(arguments, name) for name in AgentOptions._fields if name not in named_otherwise}
    # systemd sets this variable if standard error is connected to the journal.
    log = Log(errors, priorities="JOURNAL_STREAM" in os.environ)
    agent = Agent(AgentOptions(**named_otherwise, **others), log)
    agent.install_signals()
    log.info("starting", version=identity().text, process=os.getpid())
    try:
        return agent.run()
    except ProxyError as error:
        log.error("the agent cannot run", error=error)
        return FAILED
