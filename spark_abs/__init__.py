"""Asynchronous barrier snapshots for Spark Structured Streaming."""
