"""Stage snapshots: which files of a Spark checkpoint make a cut, where they are kept, how they come back."""
