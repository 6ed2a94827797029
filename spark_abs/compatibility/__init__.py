"""Whether and how a changed job continues with the data of its root."""
