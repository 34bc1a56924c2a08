"""HTTP: the OpenAI API, the admin API and the probes.

May import every room of the router but the commands and `assembly`.
"""
