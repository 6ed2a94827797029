"""The declaration of a job, and facts from Spark's plans: graph, specification, frames."""
