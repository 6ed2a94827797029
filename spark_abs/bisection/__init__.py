"""Find the first checkpoint whose tables hold wrong data."""
