"""What is asked of a root, and done with it, from outside of the job that owns it: `spark_abs.open`."""
