"""`nixl`: puts between hosts. NIXL itself is imported on first use.

May import what `transport` may.
"""
