#!/bin/sh
# Run the attribution job on a cluster: jobs/submit.sh MASTER BASE [OPTION OF attribution.py]...
#
# spark_abs goes along as a zip, to the driver and to the executors. What it imports must be there: the
# packages under install_requires in setup.cfg, in the Python that PYSPARK_PYTHON names. BASE must be a path
# that the driver and all executors reach. Memory, cores and the rest: conf/spark-defaults.conf of Spark, or
# the one in SPARK_CONF_DIR.
set -eu

fail() { echo "$1" >&2; exit 2; }
[ $# -ge 2 ] || fail "usage: jobs/submit.sh MASTER BASE [OPTION]..., as in: jobs/submit.sh spark://host:7077 /data"
command -v spark-submit >/dev/null || fail "spark-submit is missing: put the bin directory of Spark 4.2 on PATH"
command -v "${JAVA_HOME:+$JAVA_HOME/bin/}java" >/dev/null ||
  fail "Java 17 is missing: apt-get install openjdk-17-jre-headless, or set JAVA_HOME to one"
master=$1 base=$2
shift 2

here=$(cd "$(dirname "$0")/.." && pwd)
shipped=$(mktemp -d)
trap 'rm -rf "$shipped"' EXIT
(cd "$here" && "${PYSPARK_PYTHON:-python3}" -m zipfile -c "$shipped/spark_abs.zip" spark_abs)

spark-submit --master "$master" \
  --packages io.delta:delta-spark_4.2_2.13:4.4.0 \
  --py-files "$shipped/spark_abs.zip" \
  "$here/jobs/attribution.py" --config "$here/conf/attribution.yaml" --base "$base" "$@"
