"""What tests of a job need, shipped with it: the invariants, and a simulated cluster to run them against."""
