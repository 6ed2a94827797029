"""On the path of the Python processes of gates: what is in `sitecustomize` runs when they start."""
