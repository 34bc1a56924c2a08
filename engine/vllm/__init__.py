"""vLLM engines behind the microserving calls, through vLLM's public hooks.

    this process (lead): API, streams ── AsyncLLM ──► vLLM's engine core: scheduler, model, blocks
                                      ── calls ─────► `core/`: leases, puts and pins over its blocks
                                      ◄── notes ────

`engine.vllm.core` runs in vLLM's process, the rest in the lead. May import `engine.service` and
below. Nothing here is imported unless `--backend vllm` is given.
"""
