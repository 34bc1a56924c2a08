"""Any strategy, held against one engine: real processes, real deaths, the same answers.

checks ──ask──► router process ──► proxy ──► engine process   ×3, the strategy's
   │               (the strategy)    │ gate: holds a call, so that its engine can be
   │                                 │       killed, or the client leave, just then
   └───ask──► router process ───────────► engine process      the oracle: one, undisturbed
"""
