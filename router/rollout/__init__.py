"""Which strategy is active: catalog, revisions, canaries, and who changed what.

Imports `admission`, `supervision` and the rooms below them.
"""
