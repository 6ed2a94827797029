"""Tables as users name them: by a path, a URI, or a name in a catalog of Spark."""
