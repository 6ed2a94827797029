"""Consistent cuts of queries that take no barriers, found from the versions that batches read and wrote."""
