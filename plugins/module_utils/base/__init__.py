# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The forwarder of userspace mode: one thread with one event loop that forwards TCP connections and UDP datagrams.

``forwarder`` owns the table of listeners; ``tcp`` and ``udp`` serve them; ``balancing`` chooses endpoints; ``loop``
waits for descriptors and runs calls of other threads. All state belongs to the thread of the loop.
"""
