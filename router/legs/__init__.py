"""The calls to engines for one attempt at one choice, and their cleanup.

Imports `engines` and the rooms below it.
"""
