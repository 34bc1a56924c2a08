"""A worker process: `python -m router.workers LISTENER LINK`, descriptors that it inherits.

Its standard input has the configuration as JSON.
"""

from __future__ import annotations

import asyncio
import io
import socket
import sys
from pathlib import Path

import msgspec
import uvloop

from engine.protocol import MicroserveError
from router.base import RouterConfig, die_with_parent, import_from, root_cause
from router.server import Worker, run
from router.supervision import is_user_record
from router.telemetry import set_up_logging


def main() -> None:
    """Serve until the parent ends, or says so. Exits with 2 if the configuration is unusable."""
    die_with_parent()
    listener, link = (socket.socket(fileno=int(given)) for given in sys.argv[1:3])
    config = msgspec.json.decode(sys.stdin.buffer.read(), type=RouterConfig)
    set_up_logging(config.log_level, config.log_format, is_users=is_user_record)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    import_from(Path.cwd())
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(run(config, Worker(listener, link)))
    except (MicroserveError, OSError, OverflowError, ExceptionGroup) as error:
        cause = root_cause(error)
        if not isinstance(cause, MicroserveError | OSError | OverflowError):
            raise
        print(f"Error: {cause}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
