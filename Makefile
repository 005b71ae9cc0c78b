# SPDX-License-Identifier: Apache-2.0
# Each target stands alone: it sets up what it needs (scripts/setup) and then does its work.
# PYTHON=python3.12 make test   selects the interpreter that .venv is made with.
# JOBS=8 make test              compiles and tests with more than the default two processes.

PYTHON ?= python3
export PYTHON

.PHONY: demo test mutate lint format setup clean

demo:
	@scripts/setup
	@.venv/bin/logitless demo

test:
	@scripts/setup
	@scripts/test

mutate:
	@scripts/setup tools
	@.venv/bin/python tests/mutation/mutate.py --set all

lint:
	@scripts/setup tools
	@scripts/lint

format:
	@scripts/setup tools
	@scripts/lint --fix

setup:
	@scripts/setup

# Keeps .venv, which is slow to make; `rm -rf .venv` starts from nothing.
clean:
	rm -rf build dist demo-out .pytest_cache .mypy_cache .ruff_cache .hypothesis
