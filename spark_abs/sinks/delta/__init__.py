"""Delta tables as sinks: with each batch, or with each checkpoint."""
