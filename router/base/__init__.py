"""Errors, ids, configuration and small helpers. Imports no other room."""
