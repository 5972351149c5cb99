# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
#
# The two commands: `make demo` shows a miniature cluster being converged, `make test` tests everything.
# Both install their requirements; see docs/dev/testing.md for the other targets.

SHELL := /bin/sh
BIN := .venv/bin
PYTHON := $(BIN)/python
PYTEST := $(PYTHON) -m pytest
QEMU := $(PYTHON) -m tests.lab.qemu
LOAD := tests/kernel/test_migration_load.py
WIRE := tests/conformance/lab
# Empty: without tests in user-mode Linux, QEMU and Chromium, which are not installed then; for the steps kernel, modules,
# conformance and integration, and those that need no root.
GUESTS ?= 1
# Empty: as in `make test`. FULL=1, for any target: also the tests marked `full`, all scenarios, all cases.
FULL ?=
MARKS := $(if $(FULL),,and not full)
# The steps of `make test`; all run even if one fails. To run some of them: make test STEPS="lint unit"
STEPS ?= load kernel modules systemd uml unit conformance molecule pythons lint build sanity importer cores browser monitoring \
	$(if $(FULL),debian ansible-units played integration docsite environment)
# The scenarios of `make molecule`; to run one: make molecule SCENARIOS=ipvs
SCENARIOS ?= default $(if $(FULL),ipvs modes airgap)
# The unit tests of `make quick`, and without those of the documentation of `make ansible-units`: from the cluster's objects to
# the tables of each mode, and the documentation.
QUICK := cluster configuration convergence documentation generic iptables ipvs kernel nftables serviceports userspace
# Cases of the wire lab without FULL: one or two for each area; then the subsets that are repeated with IPv6 or both
# families, with legacy iptables, and on a kernel with IPVS.
AREAS := affinity-endpoint-changes cleanup clusterip-basic clusterip-sctp detect-bridge external-ips-local foreign-rules \
	forward-policy-drop hairpin hashing-client internal-local-none-local lb-ingress-changes lb-source-ranges-several many-endpoints masquerade-all \
	no-endpoints-every-address node-hints node-local-list nodeport-addresses nodeport-cluster nodeport-local-none-local open-connection-terminating \
	restart-changed-meanwhile service-port-changed terminating-matrix traffic-policy-matrix udp-nodeport-replaced \
	zone-hints-and-policies
TWINS := affinity external-ips-local hairpin lb-source-ranges nodeport-local terminating-local udp-endpoint-replaced
LEGACY := affinity cleanup clusterip-basic lb-source-ranges nodeport-cluster restart udp-endpoint-replaced
IPVS := affinity cleanup clusterip-basic clusterip-sctp external-ips-local foreign-rules hairpin 'ipvs-*' lb-ingress-changes \
	lb-source-ranges masquerade-all no-endpoints-every-address node-local-list nodeport-addresses nodeport-cluster nodeport-local \
	restart-changed-meanwhile terminating-local udp-endpoint-replaced
# The cases that apply to userspace mode, compared with the recordings of ipvs mode.
USERSPACE := affinity affinity-endpoint-changes clusterip-basic clusterip-multiport external-ips-local hairpin host-network-endpoints \
	lb-local lb-vip no-endpoints-every-address nodeport-addresses nodeport-no-endpoints open-connection-terminating service-deleted \
	terminating-cluster udp-endpoint-replaced udp-nodeport-replaced zone-hints-and-policies
IPVS_TWINS := affinity hairpin lb-source-ranges nodeport-local
# Cases on Debian's own kernels in QEMU, where each takes half a minute: those in IPVS mode with iptables-nft and ipsets, of
# which user-mode Linux runs all with legacy iptables; then those in all modes on Debian 13.
DEBIAN_IPVS := affinity clusterip-basic external-ips-local foreign-rules hairpin ipvs-sh lb-source-ranges \
	no-endpoints-every-address nodeport-addresses nodeport-local udp-endpoint-replaced
DEBIAN_13 := affinity cleanup clusterip-basic foreign-rules lb-source-ranges nodeport-local udp-endpoint-replaced
# For cases of network policies; the kernel loads others itself. Not sctp: the tests speak it themselves, and a kernel that
# can would answer each INIT with an ABORT.
NETPOL_MODULES := ip_vs,ip_vs_rr,nf_conntrack,nf_conntrack_netlink,ip_set,xt_set,dummy,veth,bridge,br_netfilter
# In IPVS mode with its packet filter in nftables; with FULL all cases, and those whose corrected behaviour differs again.
DEBIAN_FILTER_BACKEND := clusterip-basic hairpin lb-source-ranges nodeport-local
DEBIAN_CORRECTED := $(notdir $(patsubst %/,%,$(dir $(wildcard tests/conformance/cases*/*/corrected-ipvs.json))))
# Tests of the kernel's interfaces on Debian 13, with its programs and its Python.
KERNEL_13 := tests/kernel/test_ipvs_addresses.py tests/kernel/test_own_namespace.py
# Tests of IPVS beside nf_tables with NAT: on Debian's kernel, since neither this machine's nor that of user-mode Linux
# has both.
BESIDE_IPVS := tests/kernel/test_ipvs_filter_backend.py
# Of these files the tests marked so need it.
PARTLY_BESIDE_IPVS := tests/kernel/test_neighbours.py tests/kernel/test_explained_flows.py
cases = $(if $(FULL),,$(foreach case,$(1),--cases $(case)))
export FULL GUESTS
export ANSIBLE_COLLECTIONS_PATH := $(CURDIR)/collections
export ANSIBLE_HOME := $(CURDIR)/.cache/ansible
export PYTHONPATH := $(CURDIR)
export PATH := $(CURDIR)/$(BIN):$(PATH):/usr/sbin:/sbin
# Some container images set both: Python would read the payload of a module byte by byte, and compile each file again for
# each process.
unexport PYTHONUNBUFFERED PYTHONDONTWRITEBYTECODE

.PHONY: help pins e2e debian guests minimal setup setup-lab soak changelog demo docs docsite environment integration record test test-full quick format lint unit pythons kernel load monitoring browser uml systemd molecule \
	modules sanity ansible-units build .packed cores importer played conformance clean

help:
	@sed -n 's/^| `\(make [a-z0-9-]*\)` | \([^|]*\) |.*/\1\t\2/p' docs/dev/testing.md | expand -t 20

setup:
	@.ci/bootstrap lint

setup-lab:
	@.ci/bootstrap $(if $(GUESTS),lab,kernel)

# In one shell, so that the demonstration can report how long its preparation took.
demo:
	@DEMO_STARTED=$$(date +%s); export DEMO_STARTED; .ci/bootstrap demo && $(PYTHON) -m tests.lab.demo

docs: setup
	$(PYTHON) -m tests.documentation

changelog: setup
	.ci/changelog

docsite: setup
	.ci/docsite

environment: .packed
	.ci/environment

pins: setup
	$(PYTHON) -m tests.pins

record: setup-lab
	$(PYTHON) -m tests.documentation --record
	$(PYTHON) -m tests.fleet

test: setup-lab
	@$(PYTHON) -m tests.steps $(STEPS)

test-full:
	@$(MAKE) --no-print-directory test FULL=1

# For use while editing: without root, in about half a minute.
quick: setup
	$(BIN)/ruff check .
	$(PYTEST) -q -n 2 -m "not full" $(QUICK:%=tests/unit/%) tests/unit/test_*.py

format: setup
	$(BIN)/ruff check --fix --select I .
	$(BIN)/ruff format .

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy plugins/module_utils tests/lab tests/e2e tests/conformance tests/netpol tests/documentation tests/molecule_support tests/monitoring/dashboard.py \
	  tests/monitoring/expressions.py tests/fleet/browser.py tests/fleet/samples.py tests/fleet/__main__.py tests/steps.py
	$(BIN)/yamllint --strict .
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/ansible-lint --offline --profile production
	$(BIN)/antsibull-docs lint-collection-docs --plugin-docs --validate-collection-refs=all .
	$(BIN)/antsibull-changelog lint
	.ci/changelog --check
	$(BIN)/reuse lint --quiet || { $(BIN)/reuse lint --lines; exit 1; }
	@if command -v shellcheck >/dev/null; then shellcheck $$(grep -lx "#!/bin/sh" .ci/*); \
	else echo "error: shellcheck is not installed: apt-get install shellcheck" >&2; exit 2; fi

unit: setup
	$(PYTEST) -q -n 2 $(if $(FULL),,-m "not full") tests/unit

# Alert rules and dashboard, with Prometheus' own tool.
monitoring: setup
	$(PYTEST) -q tests/monitoring

browser: setup-lab
	$(PYTEST) -q tests/fleet

# Two files at a time, here and below: much of the time is spent waiting for nodes and for conditions.
kernel: setup-lab
	$(PYTEST) -q -n 2 --dist loadfile --no-loadscope-reorder tests/kernel -m "not uml and not ipvs $(MARKS)" --ignore $(LOAD) --ignore $(BESIDE_IPVS)

# Not in parallel, since an emulated node needs all processors.
load: setup-lab
	$(PYTEST) -q $(if $(FULL),,-m "not full") $(LOAD)

# Two guests at a time, each with one processor, share the files. The plug-in of hypothesis, which no test there uses,
# would import all of hypothesis at the end.
uml: setup-lab
	@board=$$(mktemp -d); trap 'rm -rf "$$board"' EXIT; printf '%s\n' 1 2 | xargs -P 2 -I % sh -c \
	  '$(PYTHON) -m tests.lab.uml $(if $(FULL),--timeout 7200) --memory 1G --writable '$$board' --env TEST_BOARD='$$board' -- \
	  $(PYTEST) -q -p no:cacheprovider -p no:hypothesispytest tests/kernel tests/modules -m "uml $(MARKS)"'

systemd: setup-lab
	$(PYTEST) -q -n 2 --dist loadfile --no-loadscope-reorder $(if $(FULL),,-m "not full") tests/systemd

molecule: setup-lab
	@failed=; trap 'exit 130' INT TERM; trap '$(PYTHON) -m tests.molecule_support down $$scenario' EXIT; \
	for scenario in $(SCENARIOS); do \
	  echo "== molecule $$scenario"; start=$$(date +%s); \
	  molecule test --no-command-borders --scenario-name $$scenario || failed="$$failed $$scenario"; \
	  echo "== molecule $$scenario took $$(( $$(date +%s) - start )) s"; \
	done; \
	if [ -n "$$failed" ]; then echo "error: failed:$$failed" >&2; exit 1; fi

modules: setup-lab
	$(PYTEST) -q -n 2 --dist loadfile --no-loadscope-reorder tests/modules -m "not uml $(MARKS)"

sanity: setup
	.ci/ansible-test sanity

# In namespaces, since the targets change their host.
integration: setup-lab
	.ci/ansible-test integration
ifneq ($(and $(FULL),$(GUESTS)),)
	$(PYTHON) -m tests.lab.uml -- .ci/ansible-test integration ipvs_services
endif

# Of the engine only: other tests need Ansible's programs, or markers that ansible-test does not know.
ansible-units: setup
	.ci/ansible-test units $(patsubst %,tests/unit/%/,$(filter-out documentation,$(QUICK)))

build: setup
	.ci/build

cores: .packed
	.ci/cores

played: .packed setup-lab
	.ci/play-installed

importer: .packed
	.ci/importer

.packed: setup
	@.ci/build --if-needed

pythons: setup
	.ci/pythons

conformance: setup-lab
	$(WIRE) run --mode iptables --iptables nft $(call cases,$(AREAS)) --jobs 6
	$(WIRE) run --mode iptables --iptables nft $(call cases,$(TWINS)) --families dual --jobs 6
	$(WIRE) run --mode iptables --iptables legacy $(call cases,$(LEGACY)) --jobs 6
	$(WIRE) run --mode nftables $(call cases,$(AREAS)) --jobs 6
	$(WIRE) run --mode nftables $(call cases,$(TWINS)) --families ipv6 --jobs 6
	$(WIRE) run --mode userspace --agent --any-source --loose $(foreach case,$(USERSPACE),--cases $(case)) --jobs 6
ifneq ($(FULL),)
	$(WIRE) run --mode iptables --iptables nft --families ipv6 --jobs 6
	$(WIRE) run --mode nftables --families dual --jobs 6
endif
	$(PYTEST) -q -n 2 -m "not ipvs $(MARKS)" tests/netpol
ifneq ($(GUESTS),)
# One case at a time in each guest: a kernel's list of one namespace's virtual servers is affected by other namespaces.
	$(WIRE) uml --timeout 7200 --jobs 2 -- run --mode ipvs $(call cases,$(IPVS)) --jobs 1
	$(WIRE) uml --jobs 2 -- run --mode ipvs $(call cases,$(IPVS_TWINS)) --jobs 1 --families ipv6
endif

# Needs Kubernetes' own programs; docs/conformance.md says which. For other options: make e2e E2E="--run iptables"
e2e: setup-lab
	$(PYTHON) -m tests.e2e --binaries "$(KUBERNETES_BINARIES)" $(E2E)

# Downloads kernels and builds the root file system of Debian 13, into .cache.
guests: setup-lab
	$(QEMU)
	$(QEMU) --debian 13

# Each guest has one processor; in IPVS mode it runs one case at a time, as above.
debian: guests
	LAB_IPVS_FILTER_BACKEND=iptables $(WIRE) qemu --jobs 2 -- run --mode ipvs $(DEBIAN_IPVS:%=--cases %) --jobs 1
	LAB_IPVS_FILTER_BACKEND=nftables $(WIRE) qemu --timeout 7200 --jobs 2 -- run --mode ipvs $(call cases,$(DEBIAN_FILTER_BACKEND)) --jobs 1
ifneq ($(FULL),)
	LAB_IPVS_FILTER_BACKEND=nftables LAB_BEHAVIOUR=corrected $(WIRE) qemu --jobs 2 -- run --mode ipvs $(DEBIAN_CORRECTED:%=--cases %) --jobs 1
endif
	$(QEMU) -- $(PYTHON) -m pytest -q -p no:cacheprovider $(BESIDE_IPVS)
	$(QEMU) --timeout 7200 -- $(PYTHON) -m pytest -q -p no:cacheprovider -p no:hypothesispytest -m "ipvs $(MARKS)" $(PARTLY_BESIDE_IPVS)
	$(WIRE) qemu --debian 13 --jobs 2 -- run --mode nftables $(DEBIAN_13:%=--cases %) --jobs 1
	$(WIRE) qemu --debian 13 --jobs 2 -- run --mode iptables $(DEBIAN_13:%=--cases %) --jobs 1
	LAB_IPVS_FILTER_BACKEND=iptables $(WIRE) qemu --debian 13 --jobs 2 -- run --mode ipvs $(DEBIAN_13:%=--cases %) --jobs 1
	$(QEMU) -- $(PYTHON) -m pytest -q -p no:cacheprovider -p no:hypothesispytest tests/kernel/test_local_connections.py
	$(QEMU) --debian 13 -- python3 -m pytest -q -p no:cacheprovider -m "not full" $(KERNEL_13)
	$(QEMU) --memory 2G --timeout 10800 --modules $(NETPOL_MODULES) --env NETPOL_TIME_SCALE=6 -- \
	  $(PYTEST) -q -p no:cacheprovider -m ipvs tests/netpol

# Hours of changes, and a million endpoints. For another time and size: make soak SOAK_MINUTES=5 SOAK_ENDPOINTS=100000
soak: setup-lab
	$(PYTEST) -q -s tests/soak

# In a root file system with only the packages that .ci/bootstrap installs.
minimal: setup-lab
	.ci/minimal-root

clean:
	@if [ -x $(PYTHON) ] && [ "$$(id -u)" -eq 0 ]; then for name in lab demo; do $(PYTHON) -m tests.lab --name $$name down; done; fi
	find plugins tests molecule -name __pycache__ -prune -exec rm -rf {} +
	rm -rf build .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis .ansible collections/ansible_collections kubenode-proxy-*.tar.gz
