"""Writes `spark_abs/settings_keywords.py` from the table of settings: `python -m tests.settings_keywords`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import wrap

from spark_abs import quantities
from spark_abs.keep import keep_words
from spark_abs.settings import SETTINGS, Setting

FILE = Path(__file__).resolve().parents[1] / "spark_abs" / "settings_keywords.py"
HEAD = '''"""Settings as keyword arguments: what a type checker and an editor know about them.

Written from `settings.py` by `python -m tests.settings_keywords`; a test compares the two. A setting
that is None was not given.
"""

from __future__ import annotations

from typing import Literal, TypedDict
'''
INDENT = 4 * " "
TYPES: dict[Callable[[object], object], str] = {
    quantities.whole_number: "int",
    keep_words: "int | str",
    quantities.count_or_unlimited: f'int | Literal["{quantities.UNLIMITED}"]',
    quantities.number: "float",
    quantities.switch: "bool",
}
"""All others are text."""


def declarations() -> str:
    """Return the module."""
    storage = [s for s in SETTINGS if s.area == "storage"]
    live = [s for s in SETTINGS if s.live]
    others = [s for s in SETTINGS if s not in storage and s not in live]
    return "\n".join(
        [
            HEAD,
            *_class("StorageSettings", "TypedDict", "How an object store is reached.", storage),
            *_class("LiveSettings", "TypedDict", "What can be changed while a job runs.", live),
            *_class("JobSettings", "StorageSettings, LiveSettings", "All settings of a job.", others),
        ]
    )


def _class(name: str, bases: str, doc: str, settings: list[Setting]) -> Iterator[str]:
    yield from ("", f"class {name}({bases}, total=False):", f'    """{doc}"""', "")
    for setting in settings:
        default = f"; by default {setting.default}" if setting.default else ""
        yield f"    {setting.argument}: {_type(setting)} | None"
        doc = f'"""{setting.doc[0].upper()}{setting.doc[1:]}{default}."""'
        yield from wrap(doc, 109, initial_indent=INDENT, subsequent_indent=INDENT, break_on_hyphens=False)
    yield ""


def _type(setting: Setting) -> str:
    if isinstance(setting.read, quantities.Choice):
        values = (f'"{value}"' for value in setting.read.of)
        return f"Literal[{', '.join(values)}]"
    return TYPES.get(setting.read, "str")


if __name__ == "__main__":
    FILE.write_text(declarations())
