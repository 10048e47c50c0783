# Every target makes the environment it needs in .venv first; running one again installs nothing.

PYTEST := .venv/bin/python -m pytest
RUFF := .venv/bin/ruff

.DEFAULT_GOAL := help
.PHONY: help env demo test test-all check format bench calibrate teeth gpu-bench gpu-test clean

help: ## what can be made
	@awk -F ': .*## ' '/^[a-z-]+: .*## / { printf "make %-10s %s\n", $$1, $$2 }' Makefile

env: ## the environment .venv, with torch's CPU build where there is no GPU
	@tools/bootstrap

demo: env ## fuzz the built-in implementations, then catch a planted bug; under three minutes
	@tools/demo

test: env ## the tests; under ten minutes on two cores
	@$(PYTEST) -m "not nightly" -n auto --maxprocesses 8 --dist loadfile

test-all: env ## every test, the long ones too
	@$(PYTEST) -n auto --maxprocesses 8 --dist loadfile

check: env ## format, lint, types and the fast tests; under a minute
	$(RUFF) format --check .
	$(RUFF) check .
	.venv/bin/mypy
	$(PYTEST) -q -m "not slow and not nightly" -n auto --maxprocesses 8 --dist loadfile

format: env ## put the source in its usual form
	$(RUFF) format .
	$(RUFF) check --fix .

bench: env ## measure speed and memory and rewrite docs/benchmarks.md
	@mkdir -p .benchmarks
	$(PYTEST) tests/bench/bench_speed.py -o 'python_functions=bench_*' --benchmark-enable --benchmark-only --benchmark-json .benchmarks/latest.json
	.venv/bin/python tests/bench/record.py .benchmarks/latest.json docs/benchmarks.md

calibrate: env ## 20,000 cases per conforming implementation: no false alarm; an hour or more
	@tools/calibrate

teeth: env ## hunt every planted bug; under 25 minutes on two cores
	.venv/bin/flashproof teeth --jobs 2

gpu-bench: env ## teraflop a second of every implementation on a CUDA device; OPTIONS='--help' says what can be chosen
	@.venv/bin/python -m flashproof.ci.gpu_bench $(OPTIONS)

gpu-test: env ## the tests that need a CUDA device
	@.venv/bin/python -c 'import sys, torch; sys.exit(0 if torch.cuda.is_available() else "gpu-test: there is no CUDA device")'
	$(PYTEST) -m gpu

clean: ## remove the environment and everything that was built
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
