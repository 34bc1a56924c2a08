"""Kernels: paged attention in bfloat16 on a CPU, compiled by numba.

Imports no other room. Other rooms import its modules by name.
"""
