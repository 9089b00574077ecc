# make demo    explain a short passage in words with the shipped pair; leaves report.html
# make test    lint, types, layers, fast tests
# Each does everything from a bare clone; a second run is quick. `make help` lists the rest.

PYTHON ?= python3
VENV   ?= .venv
PY     := $(VENV)/bin/python
DRAGOMAN := $(VENV)/bin/dragoman
STAMP  := $(VENV)/.installed
PAIR   ?= zoo:smollm2-135m-L20
REPORT ?= report.html
DEMO_TEXT ?= The lighthouse on the northern cape was built in 1871, after three fishing boats had been lost in one winter. Its first keeper, a retired sailor, wrote down the weather every evening for thirty years, and his notebooks are still used by people who study how the climate of the coast has changed.

# Empty when the environment is missing or broken, or was made in another place.
VENV_READY := $(shell $(PY) -c 'import sys; sys.exit(sys.prefix == sys.base_prefix)' 2>/dev/null && test "$$(cat $(VENV)/.made-in 2>/dev/null)" = "$$(pwd -P)" && echo yes)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install fetch demo test test-slow lint docs clean clean-all FORCE

help:
	@echo 'make demo       explain a short passage with the shipped pair; leaves $(REPORT)'
	@echo 'make test       ruff, basedpyright, import-linter, the fast tests'
	@echo 'make test-slow  the slow tests: kills, soaks, training to the end'
	@echo 'make lint       only ruff, basedpyright and import-linter'
	@echo 'make docs       write docs/cli.md anew from the commands themselves'
	@echo 'make install    only make $(VENV) and install'
	@echo 'make fetch      only fetch the embedded subject'
	@echo 'make clean      remove caches and reports; make clean-all removes $(VENV) too'
	@echo 'PYTHON=python3.12 chooses the interpreter (3.11 or newer).'

$(STAMP): pyproject.toml constraints.txt tools/install.sh $(if $(VENV_READY),,FORCE)
	@MAKECMDGOALS='$(MAKECMDGOALS)' exec sh tools/install.sh '$(PYTHON)' '$(VENV)'
	@touch $@

FORCE:

install: $(STAMP)

fetch: $(STAMP)
	@$(DRAGOMAN) subjects fetch smollm2-135m

demo: fetch
	$(DRAGOMAN) explain '$(DEMO_TEXT)' --pair $(PAIR) --html $(REPORT)
	@echo
	@echo "The same as a page, hover or tap a token to read it: $(CURDIR)/$(REPORT)"

lint: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m basedpyright
	$(VENV)/bin/lint-imports

test: lint fetch
	$(PY) -m pytest

test-slow: fetch
	$(PY) -m pytest -m slow --timeout 2400

docs: $(STAMP)
	$(PY) -m dragoman.cli.reference docs/cli.md

clean:
	rm -rf .pytest_cache .ruff_cache .import_linter_cache build dist $(REPORT)
	find src tests tools benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

clean-all: clean
	rm -rf $(VENV)
