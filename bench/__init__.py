"""Measurements: each module is a command that prints a table and, as its last line, one JSON."""
