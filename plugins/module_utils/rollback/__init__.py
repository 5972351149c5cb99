# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Saved states of the node, rollback to one of them, and changes that must be confirmed.

Saving. ``converge(Request(..., history_directory=DIR, keep_states=5))`` saves the state of the node before it changes
something (``Report.saved_state`` is the number). Without a convergence::

    with KernelHandles() as handles:
        number = History(DIR).save(observe_state(handles, all_servers=False, exclude_cidrs=())).number

Rollback. It stops the agent and the timer of scheduled convergences, takes the convergence lock, saves the state before
and applies the difference; with ``check`` it changes nothing::

    rollback(RollbackRequest(to=None, history_directory=DIR, keep=None, check=False, describe=False, stop_units=True,
                             state_directory="/run/kubenode-proxy", lock_timeout=30.0)) -> RollbackReport

Without ``to`` it restores the newest state that was saved before a convergence, so that a second rollback changes
nothing.

Confirmation. ``converge(Request(..., history_directory=DIR, confirm_timeout=60))`` has systemd revert the change in a
minute (``Report.confirm_until``), unless ``confirm(state=Report.saved_state) -> ConfirmReport`` is called before. While
a change waits, another convergence is refused with HistoryError.

==================  =======================================================================
``state``           NodeState, ``observe_state(handles, all_servers, exclude_cidrs)``
``form``            the file: ``pack_record``, ``unpack_record``; StateRecord
``decisions``       what these changes share with those of iptables chains
``directory``       ``HistoryDirectory(directory)``: ``outcome``, ``note``
``store``           ``History(directory, keep)``: ``save``, ``load``, ``list``, ``newest``
``restore``         ``rollback``
``stages``          ``restore_stages``
``converged``       ``converge``: a convergence that can be undone
``guard``           the rollback hooks of a convergence
``arm``             the timer, and the program that it runs
``revert``          that program
``pending``         the change that waits
``confirm``         ``confirm``, ``withdraw``
``units``           systemd
==================  =======================================================================
"""
