"""Sequences, their block tables, and descriptions of steps. Imports no torch."""
