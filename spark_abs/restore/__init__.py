"""Going back: the plan of a restore and its execution, and reading all tables at one cut."""
