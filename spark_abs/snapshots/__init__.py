"""Stage snapshots: which files of a Spark checkpoint make a cut, how they are stored and restored."""
