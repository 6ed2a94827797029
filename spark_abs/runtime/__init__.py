"""The running job: its graph, its stages, the coordinator's hands, start and stop."""
