"""What an operator sees: plain values read from a root, without Spark and without writing anything."""
