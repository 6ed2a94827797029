"""The protocol, pure: no I/O, no clock, no Spark. Everything here is a function of recorded facts."""
