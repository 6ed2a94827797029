"""Checkpoints over all stages: the coordinator's thread, history, clean-up, and sinks outside."""
