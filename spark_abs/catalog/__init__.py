"""Tables as people name them: by a path, a URI, or a name that a catalog of Spark leads from to a table."""
