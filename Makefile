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

# Sources and pages that pass the prose lint. Add a path when it passes; never remove one.
LANGUAGE_PATHS := \
	$(filter-out %/metrics.md %/protocol.md,$(wildcard docs/reference/*.md)) \
	$(filter-out tests/mutants.py,$(wildcard tests/*.py)) \
	$(filter-out %/test_commands.py %/test_fenced.py,$(wildcard tests/e2e/*.py)) \
	$(filter-out %/test_jars.py,$(wildcard tests/engine/*.py)) \
	CHANGELOG.md \
	CONTRIBUTING.md \
	README.md \
	benchmarks \
	changes \
	docs/README.md \
	docs/adr \
	docs/explanation \
	docs/how-to \
	docs/tutorial \
	examples \
	scripts \
	src/penstock/__init__.py \
	src/penstock/catalog \
	src/penstock/clock.py \
	src/penstock/connectors \
	src/penstock/data \
	src/penstock/datasource \
	src/penstock/deadlines.py \
	src/penstock/durable/__init__.py \
	src/penstock/durable/blob.py \
	src/penstock/durable/cache.py \
	src/penstock/durable/disk.py \
	src/penstock/durable/keys.py \
	src/penstock/durable/location.py \
	src/penstock/durable/log.py \
	src/penstock/durable/memory.py \
	src/penstock/durable/probe.py \
	src/penstock/durable/process.py \
	src/penstock/durable/retrying_blob.py \
	src/penstock/durable/temp_names.py \
	src/penstock/errors.py \
	src/penstock/failpoints.py \
	src/penstock/persist/gc.py \
	src/penstock/persist/lake.py \
	src/penstock/persist/lock.py \
	src/penstock/persist/maintenance.py \
	src/penstock/persist/notify.py \
	src/penstock/persist/paths.py \
	src/penstock/persist/readability.py \
	src/penstock/persist/requests.py \
	src/penstock/persist/scan_holds.py \
	src/penstock/persist/settings.py \
	src/penstock/persist/staging.py \
	src/penstock/persist/state_store.py \
	src/penstock/persist/store.py \
	src/penstock/pipeline \
	src/penstock/progress \
	src/penstock/protocol \
	src/penstock/reclock \
	src/penstock/reduce \
	src/penstock/retry.py \
	src/penstock/sdk \
	src/penstock/telemetry.py \
	src/pyspark_penstock \
	tests/README.md \
	tests/catalog \
	tests/chaos \
	tests/contracts \
	tests/data \
	tests/datasource \
	tests/pipeline \
	tests/progress \
	tests/protocol \
	tests/reclock \
	tests/reduce \
	tests/sdk \

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
	PENSTOCK_TEST_SEED=$(SEED) $(PY) -m pytest -n 3 --dist worksteal --durations=20 --hypothesis-seed=$(SEED)

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
	@$(PY) -m penstock.testing.kafka

.PHONY: examples
examples: setup ## one part after the other: collections, Spark, Postgres, a connector, kill -9, Kafka
	$(PY) examples/persist_demo.py
	$(PY) examples/spark_demo.py
	$(PY) examples/postgres_demo.py
	$(PY) examples/connector_demo.py
	$(PY) examples/materialize_demo.py
	$(PY) examples/kafka_and_postgres.py

.PHONY: protocol
protocol: setup ## Python from proto/*.proto, again
	@scripts/generate-protocol $(PY)

.PHONY: requirements
requirements: setup ## pin requirements*.in again, at the newest versions
	$(PIN) --upgrade requirements.in -o requirements.txt
	$(PIN) --upgrade requirements-dev.in -o requirements-dev.txt
	$(PIN) --upgrade requirements-delta.in -o requirements-delta.txt
	$(PIN) --upgrade requirements-debezium.in -o requirements-debezium.txt
	$(PIN) --upgrade requirements-mutants.in -o requirements-mutants.txt

.PHONY: clean
clean: ## remove everything that is not source
	rm -rf $(VENV) .venv-* build dist demo-data
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .grimp_cache
	find src tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
