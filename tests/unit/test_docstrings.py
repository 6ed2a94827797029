"""Public functions with parameters say their contract. A property or a plain question needs no sentence."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TOP = Path(__file__).parents[2]
DECORATORS = {"property", "override", "overload", "setter"}


def _undocumented(
    body: list[ast.stmt], inside: str = "", inherited: frozenset[str] = frozenset()
) -> Iterator[str]:
    """Name functions without a docstring; a method has that of the base class in its module."""
    documented: dict[str, frozenset[str]] = {}
    for node in body:
        name = getattr(node, "name", "_")
        if name.startswith("_") or name in inherited:
            continue
        if isinstance(node, ast.ClassDef):
            documented[name] = frozenset(
                each.name
                for each in node.body
                if isinstance(each, ast.FunctionDef) and ast.get_docstring(each)
            )
            bases = (documented.get(ast.unparse(base), frozenset()) for base in node.bases)
            yield from _undocumented(node.body, f"{inside}{name}.", frozenset().union(*bases))
        elif isinstance(node, ast.FunctionDef) and _has_parameters(node) and not ast.get_docstring(node):
            decorators = {ast.unparse(each).split(".")[-1] for each in node.decorator_list}
            if not decorators & DECORATORS:
                yield f"{inside}{name}"


def _has_parameters(node: ast.FunctionDef) -> bool:
    arguments = node.args
    every = [
        *arguments.posonlyargs,
        *arguments.args,
        *arguments.kwonlyargs,
        arguments.vararg,
        arguments.kwarg,
    ]
    return bool({each.arg for each in every if each} - {"self", "cls"})


@pytest.mark.parametrize("folder", ["spark_abs", "jobs"])
def test_public_functions_with_parameters_have_docstrings(folder: str) -> None:
    missing = [
        f"{path.relative_to(TOP)}: {name}"
        for path in sorted((TOP / folder).rglob("*.py"))
        for name in _undocumented(ast.parse(path.read_text()).body)
    ]
    assert missing == []


def test_a_function_with_parameters_is_asked_and_a_property_is_not() -> None:
    source = (
        "class A:\n    @property\n    def b(self): ...\n    def c(self): ...\n    def d(self, e): ...\n"
        "def f(g): ...\ndef _h(i): ...\n"
        'class B:\n    def j(self, k):\n        """Say."""\n'
        "class C(B):\n    def j(self, k): ...\n    def l(self, m): ..."
    )
    assert list(_undocumented(ast.parse(source).body)) == ["A.d", "f", "C.l"]
