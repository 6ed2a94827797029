"""Whether and how a job that was changed goes on from what its root holds."""
