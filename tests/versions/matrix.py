"""The support matrix, from the outcomes of tests: `python -m tests.versions.matrix OUTCOMES…` prints it.

If every test passed it is written into the guide, and in short into the README.

A feature is claimed for a version of Spark if every test of the feature that ran on any version passed on
this one, and one at least of each entry of the feature. Nothing else makes a `yes`.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from spark_abs.spark.versions import STATE_REWRITER_SINCE, SUPPORTED
from tests.markdown_support import GUIDE, PACKAGE, README
from tests.versions.features import FEATURES, Feature, belongs, feature_of

PAGE = GUIDE / "supported-versions.md"
YES, FAILS, NOT_TESTED, NOT_THERE = "yes", "**fails**", "not tested", f"needs {STATE_REWRITER_SINCE}"
_WORST_FIRST = (FAILS, NOT_TESTED, NOT_THERE, YES)
PASSED = "passed"
_PART = "(<!-- {0} -->\n)(.*?)(<!-- end of {0} -->)"
Cells = Mapping[str, str]
"""What a row says of each version of Spark."""


@dataclass(frozen=True, slots=True)
class Environment:
    """What tests ran on, as releases."""

    spark: str
    python: str
    pandas: str
    java: str


@dataclass(frozen=True, slots=True)
class Result:
    """What became of a test."""

    outcome: str
    lines: tuple[str, ...]
    """The versions of Spark that it ran on, such as 4.0."""


@dataclass(frozen=True, slots=True)
class Outcomes:
    """What one run of pytest says."""

    environment: Environment
    code: str
    """The digest of the package that was tested."""
    rewrites_state: bool
    """Whether this Spark can rewrite state."""
    tests: Mapping[str, Result]

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Outcomes:
        found = json.loads(text)
        tests = {test: Result(r["outcome"], tuple(r["lines"])) for test, r in found["tests"].items()}
        return cls(Environment(**found["environment"]), found["code"], found["rewrites_state"], tests)


def code_digest() -> str:
    """Return the digest of all modules of the package."""
    digest = hashlib.sha256()
    for module in sorted(PACKAGE.rglob("*.py")):
        digest.update(module.relative_to(PACKAGE).as_posix().encode() + b"\0" + module.read_bytes() + b"\0")
    return digest.hexdigest()


def line_of(release: str) -> str:
    """Return the version of a release of Spark as the matrix has it: `4.0` of `4.0.5`."""
    return ".".join(release.split(".")[:2])


def matrix(runs: Sequence[Outcomes]) -> Mapping[str, Cells]:
    """Return what is known of each feature on each supported version of Spark."""
    return {feature.name: {line: _cell(feature, line, runs) for line in SUPPORTED} for feature in FEATURES}


def _cell(feature: Feature, line: str, runs: Sequence[Outcomes]) -> str:
    results = [
        (test, result) for run in runs for test, result in run.tests.items() if feature_of(test) == feature
    ]
    here = [(test, result.outcome) for test, result in results if line in result.lines]
    passed = {test for test, outcome in here if outcome == PASSED}
    if any(outcome == "failed" for _, outcome in here):
        return FAILS
    there = [run.rewrites_state for run in runs if line_of(run.environment.spark) == line]
    if feature.rewrites_state and there and not any(there):
        return NOT_THERE
    every_entry = all(any(belongs(test, entry) for test in passed) for entry in feature.tests)
    return YES if every_entry and passed == {test for test, _ in results} else NOT_TESTED


def short(cells: Mapping[str, Cells]) -> Mapping[str, Cells]:
    """Return two rows: the features that rewrite state, and all others; each with its worst cells."""
    rewriting = {feature.name for feature in FEATURES if feature.rewrites_state}
    rows = {
        "edits of state, another number of shuffle partitions": rewriting,
        "all else": cells.keys() - rewriting,
    }
    return {
        name: {line: min((cells[f][line] for f in features), key=_WORST_FIRST.index) for line in SUPPORTED}
        for name, features in rows.items()
    }


def table(cells: Mapping[str, Cells]) -> str:
    """Return rows as a table in Markdown."""
    return "\n".join(_lines(("Spark", *SUPPORTED), ((name, *row.values()) for name, row in cells.items())))


def with_part(text: str, name: str, new: str) -> str:
    """Return a text with something else between the two comments that have a name."""
    return re.sub(_PART.format(name), lambda found: f"{found[1]}{new}\n{found[3]}", text, flags=re.DOTALL)


def environments(runs: Sequence[Outcomes]) -> str:
    """Return what the runs had, and how many of their tests passed, as a table in Markdown."""
    found: dict[Environment, list[str]] = {}
    for run in runs:
        found.setdefault(run.environment, []).extend(r.outcome for r in run.tests.values())
    rows = (
        (e.spark, e.python, e.pandas, e.java, f"{outcomes.count(PASSED)} of {len(outcomes)}")
        for e, outcomes in found.items()
    )
    return "\n".join(_lines(("Spark", "Python", "pandas", "Java", "tests passed"), rows))


def _lines(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield "|---" * len(head) + "|"
    yield from (f"| {' | '.join(row)} |" for row in rows)


def main(files: Sequence[str]) -> int:
    """Print the tables, and the tests that did not pass; return 1 if there is one, else 0."""
    runs = [Outcomes.from_json(Path(file).read_text(encoding="utf-8")) for file in files]
    if {run.code for run in runs} != {code_digest()}:
        sys.stderr.write(
            "The runs tested another code than that of the package: run make test-versions again\n"
        )
        return 1
    cells, found = matrix(runs), environments(runs)
    bad = [f"{test}: {r.outcome}" for run in runs for test, r in run.tests.items() if r.outcome != PASSED]
    sys.stdout.write("".join(f"{line}\n" for line in (table(cells), found, *bad)))
    if bad or not {cell for row in cells.values() for cell in row.values()} <= {YES, NOT_THERE}:
        return 1
    page = with_part(PAGE.read_text(encoding="utf-8"), "matrix", table(cells))
    PAGE.write_text(with_part(page, "environments", found), encoding="utf-8")
    readme = with_part(README.read_text(encoding="utf-8"), "matrix", table(short(cells)))
    README.write_text(readme, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
