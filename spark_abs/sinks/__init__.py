"""Where the results of a job go."""
