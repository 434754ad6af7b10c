# Every target sets up what it needs (.ci/setup): finds a Python >= 3.12, makes
# .venv, installs the packages pinned in constraints.txt, once.

SHELL := bash
BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest

export MPLBACKEND := Agg
# With a GPU build of jax, tests still run on emulated CPU devices.
test test-slow golden: export JAX_PLATFORMS := cpu

.DEFAULT_GOAL := help
.PHONY: help quickstart install check test test-slow docs format constraints \
	golden clean

help: ## List the targets.
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1	\2/p' Makefile | expand -t 20

quickstart: ## Pre-train a small GLM-5 on real text; under 15 minutes on two cores.
	@.ci/setup run
	@$(BIN)/python -m glm5_jax.data.corpus --output=runs/corpus
	@$(BIN)/python -m glm5_jax.launch --config=experiments/quickstart.py --workdir=runs/quickstart

install: ## Make .venv with all that development needs.
	@.ci/setup dev

check: install ## Lint, format, import layers, types.
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports
	$(BIN)/mypy

test: install ## Run the tests; a few minutes on two cores.
	$(PYTEST) -n 2 --dist loadfile -m "not gpu and not tpu and not slow"

test-slow: install ## Run the tests that take over ten seconds each.
	$(PYTEST) -n 2 --dist loadfile -m "slow and not gpu and not tpu"

docs: ## Build the documentation into site/.
	@.ci/setup docs
	$(BIN)/python -m mkdocs build --strict

format: install ## Fix what ruff can fix.
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

golden: install ## Write the experiments' golden texts anew.
	$(PYTEST) tests/experiments/all_test.py -k golden --update-golden

constraints: install ## Resolve the newest packages that setup.cfg allows into constraints.txt.
	$(BIN)/python .ci/pin.py constraints.txt

clean: ## Remove .venv, caches and built documentation; runs/ stays.
	@rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .import_linter_cache build dist site *.egg-info
	@find . -name __pycache__ -not -path './runs/*' -prune -exec rm -rf {} +
