"""The commands that talk to a running router, or check what it would run.

May import `options` and the modules beside this room, and the rooms below `cli`.
"""
