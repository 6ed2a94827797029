"""The shape of the code, checked on its syntax: who imports whom, how long modules are, what lies where."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import spark_abs

HERE = Path(__file__).resolve().parents[2]
PACKAGE = HERE / "spark_abs"

LAYERS = (
    {
        "model",
        "errors",
        "codec",
        "manifest",
        "markup",
        "logs",
        "quantities",
        "packages",
        "keep",
        "settings",
        "settings_keywords",
        "advice",
    },
    {"alignment"},
    {"protocol", "cuts"},
    {"store"},
    {"manifests", "run_context"},
    {"spark", "catalog", "channels", "state", "snapshots", "sinks"},
    {"observe"},
    {"diagnosis"},
    {"restore", "rewind", "report"},
    {"bisection", "watch"},
    {"job_root"},
    {"plan"},
    {"stages"},
    {"checkpointing", "compatibility"},
    {"run"},
    {"job", "wrapped"},
    {"cli"},
)
"""A room imports from its own layer and from those before it."""

SHIPPED_FOR_TESTS = "testing"
FACES = {"__init__", "__main__"}
"""They show what others made, from any layer."""

PURE = {"alignment", "cuts", "protocol"}
NOT_IN_PURE = {"pyspark", "pyarrow", "deltalake", "os", "time", "threading", "random"}
TOP_LEVEL = {
    "setup.cfg",
    "pyproject.toml",
    "Makefile",
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "LICENSE",
    ".gitignore",
    ".ci",
    "spark_abs",
    "jobs",
    "conf",
    "tests",
    "notebooks",
}
LONGEST = 600
MOST_POSITIONAL = 5
"""A call may pass so many arguments by position; `self` and `cls` do not count."""
STUB = PACKAGE / "__init__.pyi"
MODULES = sorted(PACKAGE.rglob("*.py"))
FACE = "spark_abs"


def name_of(module: Path, above: Path = HERE) -> str:
    """Return the full name of a module; a package's is that of its directory."""
    parts = module.relative_to(above).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


BY_NAME = {name_of(m): m for m in MODULES if m.parent != PACKAGE or m.stem not in FACES}
"""All modules but the face of the package, which shows what others made, and its command."""

ROOMS = set().union(*LAYERS)


def room_of(module: Path) -> str:
    return module.relative_to(PACKAGE).parts[0].removesuffix(".py")


def layer_of(room: str) -> int:
    found = [number for number, rooms in enumerate(LAYERS) if room in rooms]
    assert found, f"{room} has no place in the import law: add it to a layer"
    return found[0]


def imports_of(module: Path) -> Iterator[str]:
    """Yield every imported module by its full name, also from inside functions and type-checking blocks."""
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno}: relative import"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def rooms_imported(module: Path) -> set[str]:
    own = [name.split(".") for name in imports_of(module) if name.split(".")[0] == "spark_abs"]
    return {parts[1] for parts in own if len(parts) > 1}


@pytest.mark.parametrize("module", MODULES, ids=lambda m: str(m.relative_to(PACKAGE)))
def test_a_room_imports_only_from_its_layer_and_below(module: Path) -> None:
    room = room_of(module)
    if room in FACES or room == SHIPPED_FOR_TESTS:
        return
    above = {other for other in rooms_imported(module) if layer_of(other) > layer_of(room)}
    assert not above, f"{module.relative_to(HERE)} imports from above itself: {sorted(above)}"


def imported_among(modules: Mapping[str, Path]) -> dict[str, set[str]]:
    """Return which of some modules each of them imports, lazily too; all by their full names."""
    return {name: {i for i in imports_of(m) if i in modules and i != name} for name, m in modules.items()}


def cycle_among(modules: Mapping[str, Path]) -> list[str]:
    """Return a cycle of imports, nothing if there is none."""
    try:
        TopologicalSorter(imported_among(modules)).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_module_imports_itself_through_others() -> None:
    imported = imported_among(BY_NAME)
    assert "spark_abs.restore.apply" in imported["spark_abs.run.start"], "inside a function"
    assert "spark_abs.plan.specs" in imported["spark_abs.job"]
    assert " <- ".join(cycle_among(BY_NAME)) == ""


def test_no_module_goes_through_the_face() -> None:
    """The face imports what it is asked for: who asks it imports in a circle that nobody sees.

    The registry of sinks has each kind in one line, and names the public class there for type checkers only.
    """
    assert FACE in imports_of(HERE / "tests/root_support.py")
    assert [m.name for m in MODULES if m.stem not in FACES and FACE in imports_of(m)] == ["registry.py"]
    assert "if TYPE_CHECKING:\n    import spark_abs\n" in (PACKAGE / "sinks/registry.py").read_text()


@pytest.mark.parametrize(
    "back",
    [
        "from shop.first import one",
        "def lazily():\n    from shop.first import one",
        "if TYPE_CHECKING:\n    import shop.first",
        "class Late:\n    def call(self):\n        from shop import first",
    ],
)
def test_a_cycle_is_found_wherever_the_import_stands(tmp_path: Path, back: str) -> None:
    (tmp_path / "shop").mkdir()
    sources = {"__init__": "", "first": "from shop.second import two", "second": back}
    for name, source in sources.items():
        (tmp_path / "shop" / f"{name}.py").write_text(source)
    modules = {name_of(m, tmp_path): m for m in sorted((tmp_path / "shop").glob("*.py"))}
    assert set(cycle_among(modules)) == {"shop.first", "shop.second"}
    (tmp_path / "shop/second.py").write_text("")
    assert cycle_among(modules) == []


def test_no_room_imports_itself_through_others() -> None:
    rooms: dict[str, set[str]] = {}
    for module in BY_NAME.values():
        room = room_of(module)
        rooms.setdefault(room, set()).update(rooms_imported(module) & ROOMS - {room})
    try:
        TopologicalSorter(rooms).prepare()
    except CycleError as error:
        pytest.fail(f"a cycle of rooms: {' <- '.join(error.args[1])}")


def test_the_product_does_not_import_what_is_shipped_for_tests() -> None:
    guilty = [
        m for m in MODULES if room_of(m) != SHIPPED_FOR_TESTS and SHIPPED_FOR_TESTS in rooms_imported(m)
    ]
    assert guilty == []


def test_the_protocol_is_pure() -> None:
    for module in MODULES:
        if room_of(module) in PURE:
            impure = {name.split(".")[0] for name in imports_of(module)} & NOT_IN_PURE
            assert not impure, f"{module.relative_to(HERE)} imports {sorted(impure)}"


def test_modules_stay_short() -> None:
    lengths = {str(m.relative_to(HERE)): len(m.read_text().splitlines()) for m in MODULES}
    assert {name: n for name, n in lengths.items() if n > LONGEST} == {}


def positional(function: ast.FunctionDef, *, method: bool) -> list[str]:
    """Return the parameters that a call may pass by position."""
    names = [a.arg for a in (*function.args.posonlyargs, *function.args.args)]
    return names[1:] if method and names and names[0] in ("self", "cls") else names


def functions_of(tree: ast.AST, *, method: bool = False) -> Iterator[tuple[ast.FunctionDef, bool]]:
    """Yield every function with whether it is a method, functions inside functions too."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            yield node, method
        yield from functions_of(node, method=isinstance(node, ast.ClassDef))


def crowded_functions(tree: ast.AST) -> list[str]:
    return [f.name for f, method in functions_of(tree) if len(positional(f, method=method)) > MOST_POSITIONAL]


def crowded_calls(tree: ast.AST, own: AbstractSet[str]) -> list[str]:
    """Return calls with too many positional arguments among those of `own`: the names a package defines."""
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    named = ((getattr(c.func, "id", getattr(c.func, "attr", "")), c) for c in calls)
    return [f"{c.lineno}: {n}" for n, c in named if n in own and len(c.args) > MOST_POSITIONAL]


def wide_classes(tree: ast.AST) -> set[str]:
    """Return the classes with more fields than a call may pass by position."""
    classes = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    return {
        c.name for c in classes if sum(isinstance(part, ast.AnnAssign) for part in c.body) > MOST_POSITIONAL
    }


def test_no_call_passes_more_than_five_arguments_by_position() -> None:
    """Parameters beyond are keyword-only; fields of dataclasses are named where they are many."""
    trees = {str(m.relative_to(HERE)): ast.parse(m.read_text()) for m in MODULES}
    own = {"cls"}.union(*map(wide_classes, trees.values()))
    assert {name: found for name, tree in trees.items() if (found := crowded_functions(tree))} == {}
    assert {name: found for name, tree in trees.items() if (found := crowded_calls(tree, own))} == {}


def test_a_crowded_call_is_found_wherever_it_stands() -> None:
    wide = ast.parse("class Wide:\n" + "".join(f"    f{n}: int\n" for n in range(6)))
    assert wide_classes(wide) == {"Wide"}
    assert crowded_calls(ast.parse("def f(): return [x.Wide(1, 2, 3, 4, 5, 6)]"), {"Wide"}) == ["1: Wide"]
    assert crowded_calls(ast.parse("Wide(1, 2, 3, 4, 5, f5=6); log(1, 2, 3, 4, 5, 6)"), {"Wide"}) == []
    inner = ast.parse("class A:\n    def f(self, a, b, c, d, e):\n        def g(self, a, b, c, d, e): ...")
    assert crowded_functions(inner) == ["g"]


def test_private_names_of_a_module_are_used_in_it() -> None:
    """Vulture takes a name for used that is used in any module."""
    unused = []
    for module in MODULES:
        text = module.read_text()
        for node in ast.parse(text).body:
            targets = node.targets if isinstance(node, ast.Assign) else [node]
            names = [getattr(target, "id", getattr(target, "name", "")) for target in targets]
            private = [name for name in names if name.startswith("_") and not name.startswith("__")]
            unused += [f"{module.name}: {n}" for n in private if len(re.findall(rf"\b{n}\b", text)) == 1]
    assert unused == []


def test_nothing_unpickles() -> None:
    guilty = [m for m in MODULES if {"pickle", "cloudpickle", "shelve", "marshal"} & set(imports_of(m))]
    assert guilty == []


def test_every_public_name_exists_and_is_loaded_from_where_it_is_made() -> None:
    missing = {name for name in spark_abs.__all__ if not hasattr(spark_abs, name)}
    assert missing == set()
    assert {"Job", "open", "AbsError", "Mark"} <= set(spark_abs.__all__)
    classes = [value for name in spark_abs.__all__ if isinstance(value := getattr(spark_abs, name), type)]
    assert [c for c in classes if f"from {c.__module__} import {c.__name__} " not in STUB.read_text()] == []


def test_every_public_name_is_found_in_a_zip_of_the_package(tmp_path: Path) -> None:
    """`spark-submit --py-files` ships one, and nothing is unpacked."""
    made = [sys.executable, "-m", "zipfile", "-c", str(tmp_path / "ours.zip"), "spark_abs"]
    subprocess.run(made, cwd=HERE, check=True)
    program = (
        "import spark_abs; [getattr(spark_abs, n) for n in spark_abs.__all__]; print(spark_abs.__file__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(tmp_path / "ours.zip")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.stdout == f"{tmp_path / 'ours.zip/spark_abs/__init__.py'}\n", done.stderr


def test_what_only_reads_a_root_never_imports_spark() -> None:
    program = "import sys, spark_abs, spark_abs.cli.main; sys.exit('pyspark' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=HERE, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_top_level_holds_only_the_frame() -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=HERE, capture_output=True, text=True, check=True).stdout
    assert {Path(name).parts[0] for name in tracked.splitlines()} <= TOP_LEVEL
