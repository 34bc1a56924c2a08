"""What runs in vLLM's engine-core process: its connector, and leases and puts over its blocks.

All of it runs on the engine core's thread, between steps or within one, except for claims, which
may wait for a peer, and for the threads that copy and write. May import `engine.protocol` and
`kvcache`.
"""
