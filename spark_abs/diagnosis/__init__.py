"""What is wrong with a job, from facts of its root: sentences with numbers, and the command to type."""
