"""The table of completed checkpoints: one row, one commit, and the checkpoint exists."""
