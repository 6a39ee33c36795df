# The laptop runs what CI runs. Everything lives in .venv; `make help` lists the targets.
PYTHON ?= python3
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt
RUNTIME := $(VENV)/.installed
DEV := $(VENV)/.installed-dev
INPUTS := pyproject.toml constraints.txt

.DEFAULT_GOAL := help
.PHONY: help env env-dev system demo test check fmt bench soak conformance clients picture clean

help: ## List the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/\1|\2/' | while IFS='|' read -r target text; do printf '  make %-12s %s\n' "$$target" "$$text"; done

env: $(RUNTIME) ## Make .venv with what retinue needs to run

env-dev: $(DEV) ## Make .venv with what the tests and checks need too

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { echo "retinue needs Python 3.11 or newer; name one with: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV)

$(RUNTIME): $(INPUTS) | $(BIN)/python
	@echo "installing retinue into $(VENV)" >&2
	@$(PIP) -e .
	@touch $@

$(DEV): $(INPUTS) | $(BIN)/python
	@echo "installing retinue and its development tools into $(VENV)" >&2
	@$(PIP) -e '.[dev,peers,otel]'
	@touch $(RUNTIME) $@

system:
	@scripts/setup-system

demo: env ## Run the demo: no key, no network
	@$(BIN)/retinue demo $(ARGS)

test: system env-dev ## Run the tests
	@$(BIN)/python -m pytest $(ARGS)

check: env-dev ## Check format, lint, types and import rules
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

fmt: env-dev ## Format, and fix what lint can fix
	@$(BIN)/ruff check --fix-only -q .
	@$(BIN)/ruff format .

bench: env-dev ## Measure against the reference in bench/
	@$(BIN)/python -m bench $(ARGS)

soak: system env-dev ## Run the long sweeps, one after the other, and print their figures
	@$(BIN)/python -m pytest -n 0 -q -m soak $(ARGS)

conformance: env ## Run the official MCP conformance suite (needs npm)
	@scripts/conformance

clients: env ## Drive real MCP clients against scripted models (needs npm, bubblewrap and tmux)
	@scripts/clients $(ARGS)

picture: env-dev ## Record the demo, and draw its picture for the README
	@$(BIN)/python scripts/picture.py docs/demo.svg docs/demo.cast

clean: ## Remove the environment, caches and builds
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis build dist
	find src tests bench scripts -name __pycache__ -type d -prune -exec rm -rf {} +
