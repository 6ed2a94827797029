"""The channels between stages: Delta tables used as ordered logs, with the barriers in their commits (P1)."""
