"""Checkpoints for streaming queries that users start themselves."""
