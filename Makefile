PY := .venv/bin/python
JOBS ?= 2

.DEFAULT_GOAL := help
.PHONY: testspark chaosspark help setup demo chaos sim test lint format bench docs pins clean

help:  ## This list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-9s %s\n", $$1, $$2}' Makefile

setup:  ## Build .venv; compile the record codec where a C compiler is there
	@scripts/setup

demo: setup  ## Five brokers, real clients, Spark, what is killed in the middle, an account of every record: SPARK=no
ifeq ($(SPARK),no)
	@$(PY) -m examples.demo --without-spark
else
	@scripts/setup-spark
	@$(PY) -m examples.demo
endif

chaos: setup  ## Brokers killed, paused, cut off and filled up under load, and an account: SECONDS=600 SEED=...
	@$(PY) -m tests.chaos --seconds $(or $(SECONDS),600) $(if $(SEED),--seed $(SEED))

sim: setup  ## Simulated clusters, everything that can go wrong, from seeds: SEEDS=1..1000
	@$(PY) -m tests.sim cluster --seeds $(or $(SEEDS),1..1000) --jobs $(JOBS) --keep-going

lint: setup  ## Style, format and strict types
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

test: lint  ## Everything that must hold: lint, unit, property and integration tests
	$(PY) -m pytest -n $(JOBS) --dist worksteal

testspark: setup  ## The tests that need Spark and Java: installs pyspark into .venv, and Java where it may
	@scripts/setup-spark connect
	HEADRACE_SPARK=1 $(PY) -m pytest tests/pipeline tests/compat/test_spark_connector.py

chaosspark: setup  ## Real Spark drivers killed at each step of a batch and at random moments: KILLS=100 SEED=...
	@scripts/setup-spark
	$(PY) -m tests.pipeline.spark_kills --random $(or $(KILLS),100) $(if $(SEED),--seed $(SEED))

format: setup  ## Put the code into its format
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

bench: setup  ## Measure; with HEADRACE_PEERS=<dir of a Kafka launcher> side by side with Kafka
	@$(PY) -m benchmarks

docs: setup  ## Write the pages that are derived from the code
	@$(PY) -m scripts.write_docs

pins:  ## Write requirements/*.txt anew from pyproject.toml (wants uv)
	@scripts/pin

clean:  ## Remove what setup, tests and builds made
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis src/*.egg-info
	rm -f src/headrace/records/_[ac]*.c src/headrace/records/_[ac]*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
