"""The threads that send rows to sinks outside the job."""
