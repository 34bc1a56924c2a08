"""`python -m engine MODEL [flags]`: one engine process.

Prints `engine ID ready URL` to standard output when it listens; logs go to standard error. SIGTERM
and SIGINT end it with exit code 0.
"""

from __future__ import annotations

import gc
import sys

from engine.main import main

if __name__ == "__main__":
    code = main(sys.argv[1:])
    gc.freeze()  # saves the interpreter a second of looking for cycles in torch's objects
    sys.exit(code)
