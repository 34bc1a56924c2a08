"""What a strategy sees: requests, engines, clusters, leases and parameters.

Imports `legs` and the rooms below it.
"""
