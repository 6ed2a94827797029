"""The command `spark-abs`: one module per command."""
