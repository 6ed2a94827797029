"""State of Python functions, kept in columns: key groups, segments, timers; pure but for `stateful`."""
