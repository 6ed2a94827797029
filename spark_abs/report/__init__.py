"""The report: what a root records, as one page for a browser."""
