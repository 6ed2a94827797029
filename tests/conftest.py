"""The order of the tests, and one small Spark session for all that need one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from pyspark.sql import SparkSession
from xdist.scheduler import LoadScopeScheduling

from spark_abs.spark.session import spark_session
from tests.jvm import java_options

ROOMS = ("unit", "sim", "outside", "crash", "soak", "spark", "cli", "stores", "versions", "page")
"""The directories of tests: what is quick to fail comes first, then the longest modules, then shorter ones,
so that two processes that share them end at nearly the same time."""
ALONE = ("unit", "sim")
"""The rooms whose tests share nothing that is dear: any process may take any one of them."""

# Some thousand short Python processes import numpy, and none does linear algebra: a tenth of what they do is
# to start threads for it.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# The same examples every time, and no failure because the machine is busy.
settings.register_profile(
    "project", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("project")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order by room; within a room the order stays. A room without a place here is an error."""
    items.sort(key=lambda item: ROOMS.index(item.path.relative_to(Path(__file__).parent).parts[0]))


class ByModule(LoadScopeScheduling):  # type: ignore[misc]  # it has no types
    """Gives processes whole modules where tests share sessions, drivers or servers, else single tests."""

    def _split_scope(self, nodeid: str) -> str:
        module = nodeid.partition("::")[0]
        return nodeid if module.split("/")[1] in ALONE else module


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByModule:
    """Share tests out in the order they have, whatever `--dist` says."""
    config.option.loadscopereorder = False
    return ByModule(config, log)


class FailuresAtOnce:
    """Shows what failed when it fails: a run that is ended before its end has said it, too."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write the failure of one phase of one test."""
        if report.failed:
            text = f"\n{report.when} of {report.nodeid} failed:\n{report.longreprtext}"
            self._config.get_terminal_writer().line(text)


def pytest_configure(config: pytest.Config) -> None:
    """Let the process that hears of all tests show failures."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(FailuresAtOnce(config))


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """A session with Delta on two cores; its warehouse and scratch files live below pytest's directory."""
    scratch: Path = tmp_path_factory.mktemp("spark")
    with pytest.MonkeyPatch.context() as patch:
        # Python workers import the functions of jobs as this process does: by `pythonpath` in setup.cfg.
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "jobs"), prepend=os.pathsep)
        session = spark_session(
            "tests",
            "local[2]",
            **{
                "spark.driver.memory": "2g",
                "spark.driver.extraJavaOptions": java_options(),
                "spark.driver.bindAddress": "127.0.0.1",
                "spark.driver.host": "127.0.0.1",
                "spark.local.dir": str(scratch / "local"),
                "spark.sql.warehouse.dir": str(scratch / "warehouse"),
                "spark.sql.shuffle.partitions": "2",
                # A VACUUM by Spark lists directories in so many tasks, ten thousand if nothing is said.
                "spark.sql.sources.parallelPartitionDiscovery.parallelism": "2",
                "spark.sql.session.timeZone": "UTC",
                "spark.ui.enabled": "false",
                "spark.ui.showConsoleProgress": "false",
            },
        )
    session.sparkContext.setLogLevel("ERROR")
    yield session
    session.stop()


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """A developer's own SPARK_ABS_… variables must not change what tests see."""
    for name in [name for name in os.environ if name.startswith("SPARK_ABS_")]:
        monkeypatch.delenv(name)
