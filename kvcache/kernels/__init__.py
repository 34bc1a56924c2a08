"""Kernels: paged attention on a CPU, compiled by numba; copies between pools on a GPU, by Triton.

Imports no other room. Other rooms import its modules by name.
"""
