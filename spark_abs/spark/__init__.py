"""All that reaches into Spark's JVM or knows its private classes."""
