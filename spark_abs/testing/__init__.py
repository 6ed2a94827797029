"""For users' own tests: a driver of stateful functions, and the check of a two-phase sink."""
