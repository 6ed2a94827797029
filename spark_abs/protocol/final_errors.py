"""Errors of Spark and Delta that a restart cannot solve, by their conditions (of Spark 4.2, Delta 4.4).

The lists are closed: for any other error the restart policy decides, since it may not come again.
"""

from __future__ import annotations

import re

SOURCE_MOVED = frozenset(
    (
        "DELTA_SCHEMA_CHANGED",
        "DELTA_SCHEMA_CHANGED_WITH_STARTING_OPTIONS",
        "DELTA_SCHEMA_CHANGED_WITH_VERSION",
        "DELTA_STREAMING_METADATA_EVOLUTION",
        "DELTA_STREAMING_SCHEMA_MISMATCH_ON_RESTART",
    )
)
"""The columns of a source differ from its frame: a new frame may continue."""

_FINAL = frozenset(
    (
        # what others did to a source
        "DELTA_SOURCE_IGNORE_DELETE",
        "DELTA_SOURCE_TABLE_IGNORE_CHANGES",
        "DELTA_LOG_FILE_NOT_FOUND_FOR_STREAMING_SOURCE",
        "DELTA_CHANGE_DATA_FEED_INCOMPATIBLE_DATA_SCHEMA",
        "DELTA_CHANGE_DATA_FEED_INCOMPATIBLE_SCHEMA_CHANGE",
        "DIFFERENT_DELTA_TABLE_READ_BY_STREAMING_SOURCE",
        # rows that a table refuses, whenever they come
        "CHECK_CONSTRAINT_VIOLATION",
        "NOT_NULL_CONSTRAINT_VIOLATION",
        "DELTA_VIOLATE_CONSTRAINT_WITH_VALUES",
        "DELTA_NOT_NULL_CONSTRAINT_VIOLATED",
        "DELTA_EXCEED_CHAR_VARCHAR_LIMIT",
        # a plan that no stream can run, or that does not fit the state
        "STREAMING_OUTPUT_MODE",
        "UNSUPPORTED_STREAMING_OPERATOR_WITHOUT_WATERMARK",
        "STATE_STORE_COLUMN_FAMILY_SCHEMA_INCOMPATIBLE",
        "STATE_STORE_INVALID_CONFIG_AFTER_RESTART",
        "STATE_STORE_INVALID_VALUE_SCHEMA_EVOLUTION",
        "STATE_STORE_INVALID_VARIABLE_TYPE_CHANGE",
        "STATE_STORE_KEY_ROW_FORMAT_VALIDATION_FAILURE",
        "STATE_STORE_KEY_SCHEMA_NOT_COMPATIBLE",
        "STATE_STORE_VALUE_ROW_FORMAT_VALIDATION_FAILURE",
        "STATE_STORE_VALUE_SCHEMA_EVOLUTION_THRESHOLD_EXCEEDED",
        "STATE_STORE_VALUE_SCHEMA_NOT_COMPATIBLE",
        "STREAMING_QUERY_EVOLUTION_ERROR",
        "STREAMING_STATEFUL_OPERATOR_MISSING_STATE_DIRECTORY",
        "STREAMING_STATEFUL_OPERATOR_NOT_MATCH_IN_STATE_METADATA",
        "STREAMING_CHECKPOINT_MISSING_METADATA_FILE",
    )
)
_FINAL_FAMILIES = ("DELTA_STREAMING_",)
"""Schemas of Delta sources, and the log that tracks them."""
_FINAL_KINDS = re.compile(r"(?:^|caused by )(?:\w*AnalysisException\b|AssertionError: assertion failed)")
"""Failed analysis, and assertions of Spark about a plan, by the name of the exception."""
_CONDITION = re.compile(r"\[([A-Z][A-Z0-9_]*)(?:\.[A-Z0-9_]+)?\]")


def conditions(cause: str) -> frozenset[str]:
    """Return the error conditions that a cause names, without subconditions."""
    return frozenset(_CONDITION.findall(cause))


def source_moved(cause: str) -> bool:
    """Say whether a cause, as `cause_of` returns it, is a source whose columns have changed."""
    return not SOURCE_MOVED.isdisjoint(conditions(cause))


def cannot_go_away(cause: str) -> bool:
    """Say whether an error with this cause, as `cause_of` returns it, would come again in the same frame."""
    found = conditions(cause)
    return (
        not (SOURCE_MOVED | _FINAL).isdisjoint(found)
        or any(name.startswith(_FINAL_FAMILIES) for name in found)
        or _FINAL_KINDS.search(cause) is not None
    )
