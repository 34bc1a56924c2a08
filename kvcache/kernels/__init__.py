"""Kernels: paged attention on a CPU, compiled by numba.

Imports no other room. Other rooms import its modules by name.
"""
