# Needs make and a Python >= 3.10; everything else is installed into .venv from constraints.txt.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
DEMO := $(VENV)/.demo
PYTHONS ?= $(PYTHON) $(wildcard $(HOME)/.pyenv/versions/3.1[0-9]*/bin/python)
OTHER := build/$(notdir $(PYTHON))-torch-$(TORCH)
QUIETLY := --quiet --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help venv demo check test all rest quick coverage mutants acceptance docs gpu libraries torch other dist clean
MAKEFLAGS += --no-print-directory
unexport PYTHONDONTWRITEBYTECODE  # or each process of a test compiles what it imports

help: ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: $(INSTALLED) ## install the package and its tools into .venv (PYTHON=python3.x chooses the interpreter)

demo: $(DEMO) ## watch a script that trains on JPEG files behind a simulated object store, tune it, train with the result
	@$(BIN)/autotune-loader demo

check: $(INSTALLED) ## lint, format, types, layers, circles between files
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/mypy --no-error-summary
	@$(BIN)/lint-imports --no-logo

# More at a time than there are cores: many wait.
test: check ## check, then units, processes, and five seconds of each framework, of ranks and of each page
	@$(BIN)/python -m pytest -n 4 -m "smoke or not (system or acceptance)" --durations=15 -r fER

all: test rest ## test, then the rest of the system, and the claims of README on this machine

rest: $(INSTALLED) ## what `make all` has beyond `make test`
	@$(BIN)/python -m pytest -n 3 -m "system and not smoke" --durations=15 -r fER
	@$(BIN)/python -m studies live.transfer --quick
	@$(BIN)/python -m studies live.never_slower --quick

quick: $(INSTALLED) ## the unit tests: under a minute
	@$(BIN)/python -m pytest -m unit

coverage: $(INSTALLED) ## branches of the package that unit and process tests run; what a probe's own process runs does not count
	@$(BIN)/python -m pytest -n 4 -m "not (system or acceptance)" --cov --cov-report=term:skip-covered

mutants: $(INSTALLED) ## change random lines of each room and print how many of the changes no unit test notices (ROOMS="search" SEED=1)
	@$(BIN)/python -m tests.mutants $(ROOMS) $(if $(SEED),--seed $(SEED))

acceptance: $(INSTALLED) ## many simulated searches: how good the choices are, and how true the twin is
	@$(BIN)/python -m pytest -m acceptance --durations=15

docs: $(INSTALLED) ## build the documentation into site/, warnings as errors
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

torch: ## unit and process tests with another torch, in an environment of its own (TORCH=2.6.0, PYTHON=python3.10, LACKS=1: see below)
	@test -n "$(TORCH)" || { echo 'say which: make torch TORCH=2.6.0'; exit 2; }
	@$(PYTHON) -m venv $(OTHER)
	@grep -vE '^(torch|sympy)==' constraints.txt > $(OTHER)/constraints.txt
	@$(OTHER)/bin/python -m pip install $(QUIETLY) -c $(OTHER)/constraints.txt 'torch==$(TORCH)' -e '.[dev]'
	@$(OTHER)/bin/python -c 'import sys, torch; print("Python", sys.version.split()[0], "torch", torch.__version__)'
	@$(MAKE) other

# LACKS=1: as the Pythons of uv and conda are, which lack os.memfd_create and os.pidfd_open.
LACKING := import os; [delattr(os, name) for name in ("memfd_create", "pidfd_open") if hasattr(os, name)]
other:
	@PTH=$$($(OTHER)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/lacking.pth; \
		trap 'rm -f "$$PTH"' EXIT; $(if $(LACKS),echo '$(LACKING)' > "$$PTH";) \
		$(OTHER)/bin/python -m pytest -n 4 -m "not (system or acceptance)"

dist: ## build wheel and sdist, check their metadata, try the wheel alone in an empty environment of each Python at hand (PYTHONS)
	@rm -rf dist build/release
	@$(PYTHON) -m venv build/release
	@build/release/bin/python -m pip install $(QUIETLY) -c constraints.txt build twine
	@PIP_CONSTRAINT=$(CURDIR)/constraints.txt build/release/bin/python -m build . > build/release/log || { cat build/release/log; exit 1; }
	@build/release/bin/python -m twine check --strict dist/*
	@$(PYTHON) -m tests.wheel dist/*.whl $(PYTHONS)

libraries: $(INSTALLED) ## tune with the loaders of twenty libraries, each in an environment of its own under ~/.cache (LIBRARIES="monai timm")
	@$(BIN)/python -m studies libraries.attempts $(if $(LIBRARIES),--only "$(LIBRARIES)")

gpu: ## on a machine with CUDA: the tests that need it and studies/gpu (see its README)
	@sh studies/gpu/run.sh

clean: ## remove .venv, caches and build results
	@rm -rf $(VENV) build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp is written last, so that an interrupted installation is done again. What the demo needs is part of what the tests need.
$(DEMO): pyproject.toml setup.py constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit("autotune-loader needs Python 3.10 or newer; try make PYTHON=python3.11")'
	@echo "installing into $(VENV) (torch is large; this takes a minute or two)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install $(QUIETLY) -c constraints.txt -e '.[demo]'
	@touch $@

$(INSTALLED): $(DEMO)
	@echo "installing the tools of development into $(VENV)"
	@$(BIN)/python -m pip install $(QUIETLY) -c constraints.txt -e '.[dev]'
	@touch $@
