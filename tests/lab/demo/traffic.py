# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The requests of the demonstration to the converged nodes, and the answers that they must get."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Callable, Iterator, NamedTuple, Optional

from tests.lab.cluster import Lab
from tests.lab.probe import Answer
from tests.lab.topology import LabNode, pods_of

LOAD_BALANCER = "198.51.100.10"
LOCAL_LOAD_BALANCER = "198.51.100.20"
DNS, WEB, API, CART = "10.96.0.10", "10.96.10.1", "10.96.10.4", "10.96.10.5"
CHECKOUT, PAYMENTS, NO_ENDPOINTS = "10.96.10.7", "10.96.10.8", "10.96.10.11"
API6 = "fd00:10:96::4"
# Requests that reach every backend: they miss one of three with a probability of one in ten million.
ENOUGH = 40
# Requests without an answer after which a Service counts as unreachable.
PATIENCE = 2
# Requests at a time, some of which wait for a timeout.
AT_ONCE = 6

Check = Callable[[list[Answer]], Optional[str]]


class Request(NamedTuple):
    """One line of the demonstration: a request, how often it is sent, and a check that returns a fault or None."""

    title: str
    protocol: str
    address: str
    port: int
    source: str
    check: Check
    times: int = ENOUGH
    pod: Optional[str] = None
    timeout: float = 4.0


class Outcome(NamedTuple):
    """The answers in words, and what is wrong with them."""

    request: Request
    words: str
    problem: Optional[str]


def backends(*wanted: str, peer: Optional[str] = None) -> Check:
    """Expect answers of exactly these backends, at least one of each; with ``peer`` they must report that address."""

    def check(answers: list[Answer]) -> Optional[str]:
        seen = {answer.backend for answer in answers if answer.outcome == "answer"}
        if any(answer.outcome != "answer" for answer in answers):
            return f"not every request was answered: {outcomes(answers)}"
        if seen != set(wanted):
            return f"expected {', '.join(sorted(wanted))}"
        if peer and {answer.peer for answer in answers} != {peer}:
            return f"expected the backend to see {peer}"
        return None

    return check


def one_backend(answers: list[Answer]) -> Optional[str]:
    """Expect all answers from one backend, as session affinity promises."""
    seen = {answer.backend for answer in answers}
    return None if len(seen) == 1 and answers[0].outcome == "answer" else "expected always the same backend"


def nobody(*outcome: str) -> Check:
    """Expect no answer, and an end of each request in one of the given ways."""
    return lambda answers: None if {answer.outcome for answer in answers} <= set(outcome) else "expected no answer"


def outcomes(answers: list[Answer]) -> str:
    """Return answers in words: backends with their counts, and other outcomes."""
    counts: dict[str, int] = {}
    for answer in answers:
        name = answer.backend or answer.outcome
        counts[name] = counts.get(name, 0) + 1
    return ", ".join(f"{name} x{count}" for name, count in sorted(counts.items()))


def requests_for(lab: Lab, node: LabNode) -> list[Request]:
    """Return all requests that go through one node; a node without pods gets those of clients outside only."""
    pods = {other.name: pods_of(lab.snapshot, other) for other in lab.nodes}

    def named(service: str, *nodes: str) -> set[str]:
        chosen = nodes or tuple(pods)
        return {pod.name for name in chosen for pod in pods[name] if pod.name.rsplit("-", 2)[0] == service}

    inside = next((pod.name for pod in pods[node.name] if pod.name.startswith("catalog-")), "")
    steady = named("payments", "lab-iptables")
    found = [
        Request("DNS over UDP, ClusterIP", "DNS-UDP", DNS, 53, node.client, backends(*named("kube-dns"))),
        Request("DNS over TCP, ClusterIP", "DNS-TCP", DNS, 53, node.client, backends(*named("kube-dns"))),
        Request("web, ClusterIP, from a pod", "TCP", WEB, 80, "", backends(*named("web")), pod=inside),
        Request("web, NodePort", "TCP", node.address, 30080, node.client, backends(*named("web"))),
        Request("storefront, LoadBalancer", "TCP", LOAD_BALANCER, 80, node.client, backends(*named("storefront"))),
        Request(
            "storefront, client out of source ranges",
            "TCP",
            LOAD_BALANCER,
            80,
            node.stranger,
            nobody("timeout"),
            times=2,
            timeout=1.0,
        ),
        Request(
            "edge, externalTrafficPolicy Local",
            "TCP",
            LOCAL_LOAD_BALANCER,
            80,
            node.client,
            backends(*named("edge", node.name), peer=node.client),
        ),
        Request("cart, ClientIP affinity", "TCP", CART, 80, node.client, one_backend),
        Request(
            "checkout, internalTrafficPolicy Local",
            "TCP",
            CHECKOUT,
            80,
            "",
            backends(*named("checkout", node.name)),
            pod=inside,
        ),
        Request("payments, one endpoint terminating", "TCP", PAYMENTS, 9000, node.client, backends(*steady)),
        Request("api over IPv6, ClusterIP", "TCP", API6, 8080, node.client6, backends(*named("api"))),
        Request("recommendations, no endpoints", "TCP", NO_ENDPOINTS, 80, node.client, nobody("refused"), 2),
    ]
    if inside:
        return found
    return [request for request in found if request.source and request.address != LOCAL_LOAD_BALANCER]


def perform_all(lab: Lab, node: LabNode) -> Iterator[Outcome]:
    """Send all requests for a node, several at a time, and yield their outcomes in the order of the requests."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield from pool.map(lambda request: perform(lab, node, request), requests_for(lab, node))


def perform(lab: Lab, node: LabNode, request: Request) -> Outcome:
    """Send a request, and judge the answer."""
    answers: list[Answer] = []
    while len(answers) < request.times and sum(answer.outcome != "answer" for answer in answers) < PATIENCE:
        if request.pod:
            answers += lab.ask_from_pod(
                node.name, request.pod, request.protocol, request.address, request.port, request.times
            )
        else:
            answers.append(lab.ask(request.protocol, request.address, request.port, request.source, request.timeout))
    return Outcome(request, outcomes(answers), request.check(answers))
