"""The command `spark-abs`, in modules by subject."""
