"""Reads of a root for operators: nothing is written, and only rows of tables and of state need Spark."""
