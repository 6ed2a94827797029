"""State of Python functions in columns: key groups, segments, timers. Pure, except for the Spark adapters."""
