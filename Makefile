# `make help` lists the targets. Every target installs what it needs.

PYTHON ?= python3
VENV ?= .venv
FOR ?= 600
ifndef SEED
SEED := $(shell od -An -N4 -tu4 /dev/urandom | tr -d ' ')
endif

RUN := $(VENV)/bin
PY := $(RUN)/python
READY := $(VENV)/.ready
DELTA := .venv-delta
DEBEZIUM := .venv-debezium
MUTANTS := .venv-mutants
PIN := $(RUN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes \
	--no-emit-index-url --no-emit-find-links --no-annotate --custom-compile-command "make requirements"

# Tests that do not pass the prose lint yet. Remove a path when it passes; never add one.
LANGUAGE_EXEMPT := \
	tests/ingest/test_planted_bugs.py \
	tests/ingest/test_resync.py \
	tests/ingest/test_vectors.py \
	tests/materialize/test_errored_collections.py \
	tests/spark/test_initial_snapshot.py \
	tests/spark/test_corruption.py \
	tests/spark/test_filters.py \
	tests/spark/test_merge.py \
	tests/spark/test_native_reductions.py \
	tests/web/http_client.py \
	tests/web/test_page_state.py \

LANGUAGE_PATHS := src docs benchmarks examples scripts changes $(wildcard *.md) \
	$(filter-out $(LANGUAGE_EXEMPT),$(shell git ls-files 'tests/*.py' 'tests/*.md'))

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "%-15s %s\n", $$1, $$2 }' Makefile

.PHONY: setup
setup: $(READY) ## the virtual environment, with pinned requirements and penstock itself

$(READY): requirements-dev.txt pyproject.toml scripts/setup
	@scripts/setup $(VENV) $(PYTHON)
	@touch $@

.PHONY: check
check: setup ## formatting, lint, types, import contracts, prose
	$(RUN)/ruff format --check
	$(RUN)/ruff check
	$(RUN)/mypy
	$(RUN)/pyright --pythonpath $(PY)
	$(RUN)/lint-imports --no-logo
	$(RUN)/shellcheck .ci/run $(filter-out %.py,$(wildcard scripts/*))
	$(PY) scripts/lint_prose.py --max 5 --strict --top 0 $(LANGUAGE_PATHS)

.PHONY: test
test: check debian ## check, then every test; SEED=n replays a run
	@echo "seed $(SEED); to replay: make test SEED=$(SEED)"
	PENSTOCK_TEST_SEED=$(SEED) $(PY) -m tests.run -n 3 --dist worksteal --durations=20 --hypothesis-seed=$(SEED)

.PHONY: debian
debian:
	@scripts/install-debian

.PHONY: test-matrix
test-matrix: setup debian ## the tests on every Python, and a clean install; slow
	scripts/test-matrix

.PHONY: soak
soak: setup debian ## the long tests, the nemeses, each for FOR seconds, and a cluster; SEED=n replays
	@echo "seed $(SEED); to replay: make soak FOR=$(FOR) SEED=$(SEED)"
	PENSTOCK_TEST_SEED=$(SEED) $(PY) -m pytest -m long --hypothesis-seed=$(SEED)
	PENSTOCK_TEST_SEED=$(SEED) $(PY) -m tests.faults.nemesis --for $(FOR)
	PENSTOCK_TEST_SEED=$(SEED) $(PY) -m tests.ingest.nemesis --for $(FOR)
	PENSTOCK_TEST_SEED=$(SEED) $(PY) -m tests.sources.kafka.nemesis --for $(FOR)
	PENSTOCK_TEST_SEED=$(SEED) $(PY) -m tests.chaos.soak --for $(FOR)
	PENSTOCK_TEST_SEED=$(SEED) $(PY) -m tests.e2e.outside --for $(FOR)
	$(PY) -m tests.e2e.cluster

.PHONY: mutants
mutants: setup debian $(MUTANTS)/.ready ## mutation testing of what must not lose or double data; MODULE=, SAMPLE=, MINUTES=, SEED=
	$(MUTANTS)/bin/python -m tests.mutants $(if $(MODULE),--module $(MODULE)) \
		$(if $(SAMPLE),--sample $(SAMPLE)) $(if $(MINUTES),--minutes $(MINUTES)) $(if $(filter-out file,$(origin SEED)),--seed $(SEED))

$(MUTANTS)/.ready: requirements-mutants.txt pyproject.toml scripts/setup | $(READY)
	@scripts/setup $(MUTANTS) $(PY) requirements-mutants.txt
	@touch $@

.PHONY: bench-persist
bench-persist: setup ## persist measured beside bare files and beside Delta Lake
	$(PY) benchmarks/persist.py

.PHONY: bench-spark
bench-spark: setup $(DELTA)/.ready ## collections in Spark beside bare Parquet and beside Delta Lake
	$(PY) benchmarks/spark.py

$(DELTA)/.ready: requirements-delta.txt pyproject.toml scripts/setup | $(READY)
	@scripts/setup $(DELTA) $(PY) requirements-delta.txt
	@touch $@

.PHONY: bench-postgres
bench-postgres: setup debian $(DEBEZIUM)/.ready ## a Postgres followed beside its own tools and beside Debezium; slow
	$(PY) benchmarks/postgres.py

.PHONY: bench-kafka
bench-kafka: setup ## a topic followed beside Spark's own ways from Kafka to Parquet
	$(PY) benchmarks/kafka.py

.PHONY: bench-json
bench-json: setup ## JSON records decoded by the compiled scanner and by msgspec
	$(PY) benchmarks/json_decoders.py

.PHONY: bench-connectors
bench-connectors: setup debian ## connectors beside their endpoints' own bulk ways
	$(PY) benchmarks/connectors.py

.PHONY: bench-materialize
bench-materialize: setup debian ## materializations on Spark beside their endpoints' own bulk ways
	$(PY) benchmarks/materialize.py

.PHONY: bench-e2e
bench-e2e: setup debian ## from commit to commit: freshness, and the highest rate beside a subscription
	$(PY) benchmarks/e2e.py

.PHONY: postgres-scoreboard
postgres-scoreboard: setup debian $(DEBEZIUM)/.ready ## every value of every type, through Debezium and through Penstock
	$(PY) benchmarks/postgres_scoreboard.py

$(DEBEZIUM)/.ready: requirements-debezium.txt pyproject.toml scripts/setup | $(READY)
	@scripts/setup $(DEBEZIUM) $(PY) requirements-debezium.txt
	@touch $@

.PHONY: demo
demo: setup ## a live shop, from Postgres and Kafka to SQLite, with the page; Ctrl-C or FOR=30 ends it
	$(RUN)/penstock demo $$($(PY) -m penstock.demo.clicks) $(if $(filter-out file,$(origin FOR)),--for $(FOR))

.PHONY: kafka
kafka: setup ## a Kafka broker on this machine, to try things with; Ctrl-C ends it
	@$(PY) -m penstock.servers.kafka

.PHONY: examples
examples: setup ## one part after the other: collections, Spark, Postgres, a connector, kill -9, Kafka
	$(PY) examples/persist_demo.py
	$(PY) examples/spark_demo.py
	$(PY) examples/postgres_demo.py
	$(PY) examples/connector_demo.py
	$(PY) examples/materialize_demo.py
	$(PY) examples/kafka_and_postgres.py

.PHONY: reference
reference: setup ## generate the tables of the reference pages from code
	$(PY) scripts/generate_reference.py

.PHONY: protocol
protocol: setup ## Python from proto/*.proto, again
	@scripts/generate-protocol $(PY)

.PHONY: requirements
requirements: setup ## pin the dependencies again, at the newest versions
	$(PIN) --upgrade --extra all pyproject.toml -o requirements.txt
	$(PIN) --upgrade --extra all pyproject.toml requirements-dev.in -o requirements-dev.txt
	$(PIN) --upgrade --extra all pyproject.toml requirements-delta.in -o requirements-delta.txt
	$(PIN) --upgrade requirements-debezium.in -o requirements-debezium.txt
	$(PIN) --upgrade --extra all pyproject.toml requirements-mutants.in -o requirements-mutants.txt

.PHONY: clean
clean: ## remove everything that is not source
	rm -rf $(VENV) .venv-* build dist demo-data
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .grimp_cache
	find src tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
