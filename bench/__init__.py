"""Measurements. Each module is a command that prints tables and ends with one line of JSON."""
