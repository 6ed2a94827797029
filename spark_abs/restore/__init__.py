"""Restores: the plan, its execution, and edits of savepoints."""
