"""What a job declares, and what Spark's plans say of it: graph, specification, frames."""
