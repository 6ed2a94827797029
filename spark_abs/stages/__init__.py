"""One stage at work: its batches, its outputs, its barriers, and the native query that runs it."""
