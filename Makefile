# The few verbs a developer needs, in the environment that is active. `make` lists them.
.DEFAULT_GOAL := help
.PHONY: help setup test test-times lint types check docs demo matrix gpu-dry-run ci

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 14

setup: ## install the checkout with what tests and developers need, and the hooks
	pip install -e ".[test,dev]"
	pre-commit install

test: ## the default tier of the tests; T=tests/passes/decide/test_cost.py for some of them
	pytest $(T)

test-times: ## where the seconds of the tests go, into build/test_times.json
	pytest -q -p tests.support.times --times build/test_times.json $(T)

lint: ## ruff: mistakes and format
	ruff check .
	ruff format --check .

types: ## mypy --strict
	mypy

check: lint types ## what has to be clean before a commit

docs: ## build the documentation, with warnings as errors
	mkdocs build --strict

demo: ## the demo, quick
	python -m mla_compile demo --quick

matrix: ## core tests on several releases of torch
	.ci/matrix

gpu-dry-run: ## every section of the GPU benchmarks, without a GPU
	python benchmarks/gpu/run_all.py --dry-run

ci: ## everything, in a fresh environment
	.ci/run
