# Octavo needs Python 3.11 or 3.12 with pip, nothing else: every command first makes .venv, once.
#
#   make serve ARGS="--port 9000"      make test PYTHON=/path/to/python3.12
#
# PYTHON   the Python that .venv is made with; default: the first suitable of python3, python3.12, python3.11
# ARGS     further arguments of the command that is run

PYTHON ?=
ARGS ?=
export PYTHON

BIN := .venv/bin

.DEFAULT_GOAL := help
.PHONY: help setup serve test check triton diff cases operation chaos clients page k8s models lint format bench clean

help: ## show this list
	@sed -n 's/^\([a-z0-9]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 17

setup: ## make .venv with everything in it
	@.ci/setup

serve: setup ## start a cluster with the embedded model on http://127.0.0.1:8000
	@exec $(BIN)/octavo serve $(ARGS)

test: setup ## check, triton, diff, k8s, then the tests that start clusters (40 minutes)
	@.ci/suites test

check: setup ## lint, format, types and unit tests, without Ray (3 minutes)
	@.ci/suites check

triton: setup ## the GPU kernels without a GPU: interpreted, and compiled for every target (3 minutes)
	@.ci/suites triton

diff: setup ## random requests and operations in a tiny KV pool, each output against a run alone (5 minutes)
	@.ci/suites diff

cases: setup ## faults that users of such servers have met, on a real cluster (11 minutes)
	@.ci/suites cases

operation: setup ## clusters launched, watched, scaled, drained and updated, of several models, of fake groups (30 minutes)
	@.ci/suites operation

chaos: setup ## processes killed and stopped under streams that must not notice (3 minutes)
	@.ci/suites chaos

clients: setup ## lm-evaluation-harness, LangChain and schemathesis against a cluster (7 minutes)
	@.ci/suites clients

page: setup ## the live page in a headless Chromium, over a cluster (4 minutes)
	@.ci/suites page

models: setup ## real models besides the embedded one against transformers; downloads 240 MB (7 minutes)
	@.ci/suites models

k8s: setup ## the manifests, the chart and the Dockerfile, without a cluster (1 minute)
	@.ci/suites k8s

lint: setup ## lint and types
	@$(BIN)/ruff check . && $(BIN)/mypy

format: setup ## format the code and mend what the linter can
	@$(BIN)/ruff check --fix-only . ; $(BIN)/ruff format .

bench: setup ## tokens per second of the engine against transformers
	@$(BIN)/python tests/bench/engine.py $(ARGS)

clean: ## remove .venv, .venv-clients and .venv-k8s, build outputs and the caches of tools; downloaded models stay
	@rm -rf .venv .venv-clients .venv-k8s build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
