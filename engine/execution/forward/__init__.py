"""Forward passes: the rows of a step, the model over them, and CUDA graphs of decodes.

Other rooms import its modules by name.
"""
