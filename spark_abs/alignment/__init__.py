"""How far a stage reads each of its inputs, and after which batch its cut is: pure, from durable facts."""
