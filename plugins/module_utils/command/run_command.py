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
    options = AgentOptions(
        configuration=arguments.config,
        kubeconfig=arguments.kubeconfig,
        node_name=arguments.node_name,
        mode=arguments.mode,
        fallback=arguments.fallback,
        state_directory=arguments.state_directory,
        cache=arguments.cache,
        control=arguments.control,
        token=arguments.token,
        drain_file=arguments.drain_file,
        ignore_findings=tuple(arguments.ignore),
        max_unserved_percent=arguments.max_unserved_percent,
        hold_loss=arguments.hold_loss,
        verbose=arguments.verbose,
        log_format=arguments.log_format,
    )
    # systemd sets this variable if standard error is connected to the journal.
    log = Log(errors, priorities="JOURNAL_STREAM" in os.environ)
    agent = Agent(options, log)
    agent.install_signals()
    log.info("starting", version=identity().text, process=os.getpid())
    try:
        return agent.run()
    except ProxyError as error:
        log.error("the agent cannot run", error=error)
        return FAILED
