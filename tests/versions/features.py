"""Which tests show which feature: the rows of the support matrix."""

from __future__ import annotations

from dataclasses import dataclass

HERE = "tests/versions"
"""Tests in this directory start processes in several environments, so they run in one only."""


@dataclass(frozen=True, slots=True)
class Feature:
    """A row of the matrix."""

    name: str
    tests: tuple[str, ...]
    """Modules, tests, or tests with their parameters: the beginnings of ids."""
    rewrites_state: bool = False
    """It is there only where Spark can rewrite state."""

    def length(self, test: str) -> int:
        """Return the length of the longest entry that a test belongs to, or 0."""
        return max((len(entry) for entry in self.tests if belongs(test, entry)), default=0)


def belongs(test: str, entry: str) -> bool:
    """Say whether a test is the one, or one of those, that an entry names."""
    return test == entry or test.startswith((f"{entry}::", f"{entry}["))


_PAGE = "tests/spark/test_guide_code.py::test_the_code_of_a_page_runs[spark_abs/guide/{}.md]"

FEATURES = (
    Feature("sessions, and the checks of a session", ("tests/spark/test_session.py",)),
    Feature("channels and barriers", ("tests/spark/test_gate.py",)),
    Feature(
        "the quick start, as a script",
        ("tests/spark/test_newcomer.py::test_it_runs_stops_and_starts_again_in_few_lines",),
    ),
    Feature("a job that is stopped, fails, ends, or is started twice", ("tests/spark/test_job_life.py",)),
    Feature("a file that fails its batch is skipped", ("tests/spark/test_skip_file.py",)),
    Feature("functions with state", ("tests/spark/test_state_functions.py",)),
    Feature("Delta sinks that append, merge, replace and add columns", ("tests/spark/test_delta_tables.py",)),
    Feature("restore, and tables read at one checkpoint", ("tests/spark/test_restore.py",)),
    Feature("`kill -9` in a batch", ("tests/crash/test_functions.py", "tests/crash/test_leftovers.py")),
    Feature(
        "a root moves between these versions, after a kill, too",
        ("tests/versions/test_carried_root.py", "tests/spark/test_stored_shapes.py"),
    ),
    Feature("the code of the other pages of the guide", ("tests/spark/test_guide_code.py",)),
    Feature("queries that you start yourself", ("tests/spark/test_wrapped.py",)),
    Feature("a notebook that has a session, and the same as a script", ("tests/spark/test_databricks.py",)),
    Feature(
        "an installation that keeps the installed Spark",
        ("tests/versions/test_wheel.py::test_a_spark_that_is_there_stays",),
    ),
    Feature(
        "edits of state",
        ("tests/spark/test_edit.py", _PAGE.format("state-as-data")),
        rewrites_state=True,
    ),
    Feature(
        "another number of shuffle partitions",
        ("tests/spark/test_rescale.py", _PAGE.format("rescaling")),
        rewrites_state=True,
    ),
)


def feature_of(test: str) -> Feature | None:
    """Return the feature that a test counts for, by the longest entry; it counts for one only."""
    found = max(FEATURES, key=lambda feature: feature.length(test))
    return found if found.length(test) else None


def on_each_spark() -> tuple[str, ...]:
    """Return what runs on each supported Spark, as arguments of pytest."""
    entries = [entry for feature in FEATURES for entry in feature.tests]
    modules = {entry for entry in entries if "::" not in entry}
    return tuple(
        entry
        for entry in entries
        if not entry.startswith(f"{HERE}/") and (entry in modules or entry.partition("::")[0] not in modules)
    )
