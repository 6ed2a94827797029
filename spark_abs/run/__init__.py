"""The life of a run: its start, its restarts, and its end."""
