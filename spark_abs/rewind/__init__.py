"""Bring streaming queries that are not ours, and their Delta tables, back to one consistent moment.

Works on storage alone: Spark's checkpoint directories and Delta logs.
"""
