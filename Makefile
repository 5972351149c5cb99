# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
#
# The two commands: `make demo` shows a miniature cluster being converged, `make test` tests everything.
# Both set up what they need; see CONTRIBUTING.md for the other targets.

SHELL := /bin/sh
BIN := .venv/bin
PYTHON := $(BIN)/python
PYTEST := $(PYTHON) -m pytest
LOAD := tests/kernel/test_migration_load.py
UML_FIRST := tests/kernel/test_agent_ipvs.py tests/kernel/test_leaving.py tests/kernel/test_living_with_others.py
WIRE := tests/conformance/lab
# What `make test` runs, in this order; all are run even if one fails. For some of them: make test STEPS="lint unit"
STEPS ?= lint unit pythons monitoring browser kernel load uml modules systemd sanity ansible-units build importer cores played \
	molecule conformance
# What `make molecule` runs; for one: make molecule SCENARIOS=ipvs
SCENARIOS ?= default ipvs modes airgap
export ANSIBLE_COLLECTIONS_PATH := $(CURDIR)/collections
export ANSIBLE_HOME := $(CURDIR)/.cache/ansible
export PYTHONPATH := $(CURDIR)
export PATH := $(CURDIR)/$(BIN):$(PATH):/usr/sbin:/sbin

.PHONY: help setup setup-lab demo docs record test .steps lint unit pythons kernel load monitoring browser uml systemd molecule \
	modules sanity ansible-units build .packed cores importer played conformance clean

help:
	@sed -n 's/^| `\(make [a-z-]*\)` | \([^|]*\) |.*/\1\t\2/p' CONTRIBUTING.md | expand -t 20

setup:
	@.ci/bootstrap lint

setup-lab:
	@.ci/bootstrap lab

demo: setup-lab
	@$(PYTHON) -m tests.lab.demo

docs: setup
	$(PYTHON) -m tests.documentation

record: setup-lab
	$(PYTHON) -m tests.documentation --record
	$(PYTHON) -m tests.fleet

test: setup-lab
	@$(MAKE) --no-print-directory .steps RUN="$(STEPS)"

.steps:
	@failed=; for step in $(RUN); do \
	  echo "== $$step"; start=$$(date +%s); \
	  $(MAKE) --no-print-directory $$step || failed="$$failed $$step"; \
	  echo "== $$step took $$(( $$(date +%s) - start )) s"; \
	done; \
	if [ -n "$$failed" ]; then echo "error: failed:$$failed" >&2; exit 1; fi

lint: setup
	$(BIN)/ruff check .
	$(BIN)/mypy plugins/module_utils tests/lab tests/conformance tests/documentation tests/molecule_support tests/monitoring/dashboard.py \
	  tests/monitoring/expressions.py tests/fleet/browser.py tests/fleet/samples.py tests/fleet/__main__.py
	$(BIN)/yamllint --strict .
	$(BIN)/ansible-lint --offline --profile production
	$(BIN)/antsibull-docs lint-collection-docs --plugin-docs --validate-collection-refs=all .
	$(BIN)/antsibull-changelog lint
	@if command -v shellcheck >/dev/null; then shellcheck .ci/*; \
	else echo "error: shellcheck is not installed: apt-get install shellcheck" >&2; exit 2; fi

unit: setup
	$(PYTEST) -q -n 2 tests/unit

# Alert rules and dashboard, with Prometheus' own tool.
monitoring: setup
	$(PYTEST) -q tests/monitoring

browser: setup-lab
	$(PYTEST) -q tests/fleet

# Two files at a time, here and below: much of the time is Ansible waiting for a node, or a test for something to happen.
kernel: setup-lab
	$(PYTEST) -q -n 2 --dist loadfile tests/kernel -m "not uml" --ignore $(LOAD)

# Alone, since an emulated node needs all processors.
load: setup-lab
	$(PYTEST) -q $(LOAD)

# Two guests at a time: each has one processor. The second has all files that the first has not.
uml: setup-lab
	@printf '%s\n' "$(UML_FIRST)" "tests/kernel tests/modules $(UML_FIRST:%=--ignore %)" | xargs -P 2 -I % sh -c \
	  '$(PYTHON) -m tests.lab.uml --memory 1G -- $(PYTEST) -q -p no:cacheprovider % -m uml'

systemd: setup-lab
	$(PYTEST) -q -n 2 --dist loadfile tests/systemd

molecule: setup-lab
	@failed=; trap 'exit 130' INT TERM; trap '$(PYTHON) -m tests.molecule_support down $$scenario' EXIT; \
	for scenario in $(SCENARIOS); do \
	  echo "== molecule $$scenario"; start=$$(date +%s); \
	  molecule test --no-command-borders --scenario-name $$scenario || failed="$$failed $$scenario"; \
	  echo "== molecule $$scenario took $$(( $$(date +%s) - start )) s"; \
	done; \
	if [ -n "$$failed" ]; then echo "error: failed:$$failed" >&2; exit 1; fi

modules: setup-lab
	$(PYTEST) -q -n 2 --dist loadfile tests/modules -m "not uml"

sanity: setup
	.ci/ansible-test sanity

ansible-units: setup
	.ci/ansible-test units

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
	$(WIRE) run --mode iptables --iptables nft --families all --jobs 6
	$(WIRE) run --mode iptables --iptables legacy --jobs 6
	$(WIRE) run --mode nftables --families all --jobs 6
# One case at a time in each guest: a kernel that lists virtual servers of one namespace counts those of the others.
	$(WIRE) uml --jobs 3 -- run --mode ipvs --jobs 1
	$(WIRE) uml --jobs 3 -- run --mode ipvs --jobs 1 --families ipv6

clean:
	@if [ -x $(PYTHON) ] && [ "$$(id -u)" -eq 0 ]; then for name in lab demo; do $(PYTHON) -m tests.lab --name $$name down; done; fi
	rm -rf build .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis .ansible collections/ansible_collections kubenode-proxy-*.tar.gz
