"""The root of a job: its paths, its Delta tables, and the state in `control/`."""
