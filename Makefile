# Everything runs in $(VENV); a target that finds it complete installs nothing.
#
#   make quickstart    text to a registered model, on this machine
#   make test          the fast tests                    make check       ruff, mypy, import contracts, spelling
#   make test-slow     those that take longer            make chaos       killed runs come out the same
#   make services      on real servers and their pages   make services-slow   those of them that take longer
#   make bench         ratios against floors and peers   make docs        the tables of docs/guide.md, written again

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

VENV ?= .venv
PYTHON ?= python3
# More arguments for the one command of a target: make test ARGS="-k storage -x"
ARGS ?=

RUN_STAMP := $(VENV)/.installed-run
DEV_STAMP := $(VENV)/.installed-dev
# -qq: a name the index does not have at one of its places is no news; errors are still shown.
# --no-compile: modules are compiled when they are first imported; compiling all of them doubles the time.
INSTALL := $(VENV)/bin/pip install -qq --no-compile --disable-pip-version-check -c constraints.txt
# In CI a skipped test is a failure: nothing may be left out silently.
PYTEST := $(VENV)/bin/python -m pytest $(if $(CI),-p tests.ci_plugin)

.PHONY: help quickstart test test-slow services services-slow chaos check bench docs install install-dev

help:
	@sed -n 's/^#   //p' Makefile

quickstart: $(RUN_STAMP)
	@$(VENV)/bin/headrace run configs/quickstart.yaml $(ARGS)

test: $(DEV_STAMP)
	@$(PYTEST) tests --ignore=tests/chaos --ignore=tests/services --ignore=tests/browser -m "not slow" $(ARGS)

test-slow: $(DEV_STAMP)
	@$(PYTEST) tests --ignore=tests/chaos --ignore=tests/services --ignore=tests/browser -m slow $(ARGS)

services: $(DEV_STAMP)
	@$(PYTEST) tests/services tests/browser -m "not slow" $(ARGS)

services-slow: $(DEV_STAMP)
	@$(PYTEST) tests/services tests/browser -m slow $(ARGS)

chaos: $(DEV_STAMP)
	@$(PYTEST) tests/chaos $(ARGS)

check: $(DEV_STAMP)
	@echo "ruff";           $(VENV)/bin/ruff check .
	@echo "mypy";           $(VENV)/bin/mypy
	@echo "import-linter";  $(VENV)/bin/lint-imports --no-cache
	@echo "codespell";      $(VENV)/bin/codespell

bench: $(DEV_STAMP)
	@for file in benchmarks/bench_*.py; do echo "== $$file"; $(VENV)/bin/python "$$file" $(ARGS); done

docs: $(DEV_STAMP)
	@$(VENV)/bin/python tests/project/config_reference.py

install: $(RUN_STAMP)
install-dev: $(DEV_STAMP)

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "headrace needs Python 3.11 or newer, but $(PYTHON) is " + sys.version.split()[0] + "; name another: make PYTHON=python3.12")'
	@$(PYTHON) -m venv $(VENV)

# Editable: a changed source file takes effect without another installation.
$(RUN_STAMP): pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "Installing into $(VENV); the first time takes a minute or two ..." >&2
	@$(INSTALL) -e .
	@touch $@

$(DEV_STAMP): pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "Installing into $(VENV), with what the tests need ..." >&2
	@$(INSTALL) -e '.[dev]'
	@touch $@ $(RUN_STAMP)
