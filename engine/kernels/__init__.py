"""Kernels: matrix products and element-wise functions in bfloat16 and int8 on a CPU.

Imports nothing of the engine but `protocol`. Other rooms import its modules by name.
"""
