# `make` lists the targets. Everything lives in .venv; nothing outside this directory is touched.

PIP := .venv/bin/python -m pip --disable-pip-version-check install -qq -c constraints.txt
READY := .venv/.ready
# One process more than there are cores, because tests of real processes wait a part of their time. The tests
# of a file stay together, the longest files start first.
JOBS ?= $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1)
RUN_TESTS := .venv/bin/pytest -q -n $(JOBS) --no-loadscope-reorder

# Tests start hundreds of Python processes. Without bytecode each would compile the package again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup check test test-slow golden golden-renew mutants demo bench docs browser format clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' Makefile

setup: $(READY) ## make .venv with the exact versions of constraints.txt

# torch comes first and pinned: a bare `torch` takes the newest release, whose default Linux build pulls
# gigabytes of CUDA packages. The pin also accepts a CPU-only build of that version where pip is offered one.
$(READY): pyproject.toml constraints.txt
	@echo "setup: .venv"
	@python3 -m venv .venv || { echo "setup: python3 -m venv does not work; on Debian: apt-get install python3-venv"; exit 1; }
	@echo "setup: torch (the large one)"
	@$(PIP) torch==2.13.0
	@echo "setup: polyrhythm and its tools"
	@$(PIP) -e '.[dev]'
	@touch $(READY)
	@echo "setup: done"

check: $(READY) ## formatting, lint and types
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy

test: $(READY) ## the tests, but for the slow ones; PYTEST="-k gossip" chooses
	$(RUN_TESTS) -m "not slow" $(PYTEST)

test-slow: $(READY) ## the slow tests
	$(RUN_TESTS) -m slow $(PYTEST)

golden: $(READY) ## check that all strategies and codecs still compute the same bits
	.venv/bin/python -m tests.golden check

golden-renew: $(READY) ## accept new digests; CHANGELOG.md names the fix that changed them
	.venv/bin/python -m tests.golden renew

mutants: $(READY) ## plant faults in a copy of the code; the tests must notice each (ONLY=pattern)
	.venv/bin/python tests/plant.py $(if $(ONLY),--only '$(ONLY)') --jobs $(JOBS)

demo: $(READY) ## see the strategies side by side
	.venv/bin/python -m polyrhythm.lab.demo

bench: $(READY) ## measure what the README claims, as ratios within one run
	.venv/bin/python -m benchmarks

docs: $(READY) ## build the site into site/; a broken link fails
	@NO_MKDOCS_2_WARNING=1 .venv/bin/python -m mkdocs build --quiet --strict
	@echo "docs: open site/index.html"
	@echo "docs: with search: .venv/bin/python -m http.server --directory site --bind 127.0.0.1"

browser: ## install Chromium, in which a slow test looks at the site (Debian, as root)
	@command -v chromium > /dev/null || { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium; }

format: $(READY) ## format the code and fix what the linter can
	.venv/bin/ruff format .
	.venv/bin/ruff check --fix .

clean: ## remove .venv, caches and build products, but not runs/
	rm -rf .venv build dist site *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
