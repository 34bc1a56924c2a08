"""The mock engine: the real engine around a runner that computes nothing.

May import `engine.api` and below.
"""
