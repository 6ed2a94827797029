"""Keep cuts of streaming queries that are not ours, before Spark deletes their files."""
