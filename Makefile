# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
#
# The two commands: `make demo` shows a miniature cluster being converged, `make test` tests everything.
# Both install their requirements; docs/dev/testing.md describes all targets. Each does what .ci or a module of tests says.

BIN := .venv/bin
PYTHON := $(BIN)/python
PYTEST := $(PYTHON) -m pytest -q
LOAD := tests/kernel/test_migration_load.py
# Empty: without tests in user-mode Linux, QEMU and Chromium, which are not installed then.
GUESTS ?= 1
# Empty: as in `make test`. FULL=1, for any target: also the tests marked `full`, all scenarios, all cases.
FULL ?=
MARKS := $(if $(FULL),,and not full)
CONFORMANCE := $(PYTHON) -m tests.conformance $(if $(FULL),--full)
# The steps of `make test`; all run even if one fails. To run some of them: make test STEPS="lint unit"
STEPS ?= load kernel modules systemd uml unit conformance molecule pythons lint build sanity importer cores browser monitoring \
	$(if $(FULL),debian ansible-units played integration docsite environment)
# The scenarios of `make molecule`; to run one: make molecule SCENARIOS=ipvs
SCENARIOS ?= default $(if $(FULL),ipvs modes airgap)
# What `make quick` and `make ansible-units` test: from the cluster's objects to the tables of each mode.
ENGINE := base cluster configuration convergence generic kernel preflight rendering serviceports
export FULL GUESTS
export ANSIBLE_COLLECTIONS_PATH := $(CURDIR)/collections
export ANSIBLE_HOME := $(CURDIR)/.cache/ansible
export PYTHONPATH := $(CURDIR)
export PATH := $(CURDIR)/$(BIN):$(PATH):/usr/sbin:/sbin
# Some container images set both: Python would read the payload of a module byte by byte, and compile each file again for
# each process.
unexport PYTHONUNBUFFERED PYTHONDONTWRITEBYTECODE

.PHONY: $(shell sed -n 's/^\([a-z][a-z -]*\):.*/\1/p' Makefile)

help:
	@sed -n 's/^| `\(make [a-z0-9-]*\)` | \([^|]*\) |.*/\1\t\2/p' docs/dev/testing.md | expand -t 20
setup:
	@.ci/bootstrap lint
setup-lab:
	@.ci/bootstrap $(if $(GUESTS),lab,kernel)
# In one shell, so that the demonstration can report how long its preparation took.
demo:
	@DEMO_STARTED=$$(date +%s); export DEMO_STARTED; .ci/bootstrap demo && $(PYTHON) -m tests.lab.demo
test: setup-lab
	@$(PYTHON) -m tests.steps $(STEPS)
test-full:
	@$(MAKE) --no-print-directory test FULL=1

# Code and documents
quick: setup
	$(BIN)/ruff check .
	$(PYTEST) -n 2 -m "not full" $(ENGINE:%=tests/unit/%) tests/unit/documentation tests/unit/test_*.py
format: setup
	$(BIN)/ruff check --fix --select I .
	$(BIN)/ruff format .
lint changelog docsite pythons build: setup
	.ci/$@
docs: setup
	$(PYTHON) -m tests.documentation
record: setup-lab
	$(PYTHON) -m tests.documentation --record
	$(PYTHON) -m tests.fleet
pins: setup
	$(PYTHON) -m tests.pins
clean:
	@if [ -x $(PYTHON) ] && [ "$$(id -u)" -eq 0 ]; then for name in lab demo; do $(PYTHON) -m tests.lab --name $$name down; done; fi
	find plugins tests molecule -name __pycache__ -prune -exec rm -rf {} +
	rm -rf build .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis .ansible collections/ansible_collections kubenode-proxy-*.tar.gz

# Tests without a laboratory
unit: setup
	$(PYTEST) -n 2 -m "not uml $(MARKS)" tests/unit
monitoring: setup
	$(PYTEST) tests/monitoring
sanity: setup
	.ci/ansible-test sanity
# Of the engine only: other tests need Ansible's programs, or markers that ansible-test does not know.
ansible-units: setup
	.ci/ansible-test units $(ENGINE:%=tests/unit/%/)
.packed: setup
	@.ci/build --if-needed
cores importer environment: .packed
	.ci/$@

# Tests on nodes. Two files at a time: much of the time is spent waiting for nodes and for conditions.
kernel modules systemd: setup-lab
	$(PYTEST) -n 2 --dist loadfile --no-loadscope-reorder tests/$@ --ignore $(LOAD) -m "not uml and not ipvs $(MARKS)"
# Not in parallel, since an emulated node needs all processors.
load: setup-lab
	$(PYTEST) $(LOAD) -m "not uml $(MARKS)"
browser: setup-lab
	$(PYTEST) tests/fleet
molecule: setup-lab
	$(PYTHON) -m tests.molecule_support test $(SCENARIOS)
played: .packed setup-lab
	.ci/play-installed
# In namespaces, since the targets change their host.
integration: setup-lab
	.ci/ansible-test integration
	$(if $(and $(FULL),$(GUESTS)),$(PYTHON) -m tests.lab.uml -- .ci/ansible-test integration ipvs_services)
conformance: setup-lab
	$(CONFORMANCE) here
	$(PYTEST) -n 2 -m "not ipvs $(MARKS)" tests/netpol
	$(if $(GUESTS),$(CONFORMANCE) uml)
# Downloads kernels and builds the root file system of Debian 13, into .cache.
guests: setup-lab
	$(PYTHON) -m tests.lab.qemu
	$(PYTHON) -m tests.lab.qemu --debian 13
debian: guests
	$(CONFORMANCE) debian
	.ci/debian
# Needs Kubernetes' own programs; docs/conformance.md says which. For other options: make e2e E2E="--run iptables"
e2e: setup-lab
	$(PYTHON) -m tests.e2e --binaries "$(KUBERNETES_BINARIES)" $(E2E)
# Hours of changes, and a million endpoints. For another time and size: make soak SOAK_MINUTES=5 SOAK_ENDPOINTS=100000
soak: setup-lab
	$(PYTEST) -s tests/soak
uml minimal: setup-lab
	.ci/$@
