"""An Iceberg table as a sink."""
