#!/bin/sh
# Run the attribution job on a cluster: jobs/submit.sh MASTER BASE [OPTION OF attribution.py]...
#
# spark_abs goes along as a zip, to the driver and to the executors. What it imports must be there: pyspark, and
# the packages under install_requires in setup.cfg, in the Python that PYSPARK_PYTHON names. BASE must be a path
# that the driver and all executors reach. Memory, cores and the rest: conf/spark-defaults.conf of Spark, or
# the one in SPARK_CONF_DIR.
set -eu

fail() { echo "$1" >&2; exit 2; }
[ $# -ge 2 ] || fail "usage: jobs/submit.sh MASTER BASE [OPTION]..., as in: jobs/submit.sh spark://host:7077 /data"
command -v spark-submit >/dev/null || fail "spark-submit is missing: put the bin directory of Spark on PATH"
command -v "${JAVA_HOME:+$JAVA_HOME/bin/}java" >/dev/null ||
  fail "Java 17 is missing: apt-get install openjdk-17-jre-headless, or set JAVA_HOME to one"
master=$1 base=$2
shift 2

here=$(cd "$(dirname "$0")/.." && pwd)
shipped=$(mktemp -d)
trap 'rm -rf "$shipped"' EXIT
(cd "$here" && "${PYSPARK_PYTHON:-python3}" -m zipfile -c "$shipped/spark_abs.zip" spark_abs)

delta=$(cd "$here" && "${PYSPARK_PYTHON:-python3}" -c "import spark_abs; print(spark_abs.DELTA_CONNECTOR)")
spark-submit --master "$master" \
  --packages "$delta" \
  --py-files "$shipped/spark_abs.zip" \
  "$here/jobs/attribution.py" --config "$here/conf/attribution.yaml" --base "$base" "$@"
