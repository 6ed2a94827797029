"""Benchmarks: what barriers, channels and snapshots cost, as ratios measured in one run."""
