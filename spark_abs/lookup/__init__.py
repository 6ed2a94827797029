"""Which checkpoint of a root is meant, and whether it is intact."""
