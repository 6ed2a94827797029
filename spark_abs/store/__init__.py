"""The root of a job: its paths, its Delta tables, and what it keeps in `control/`."""
