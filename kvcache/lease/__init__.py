"""Receive leases: slots, addresses, receiving and sending. Imports no torch."""
