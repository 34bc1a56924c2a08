"""The health of one engine: asks for it again and again, and decides whether the engine is up."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from engine.protocol import EngineState, MicroserveError
from router.base import Conflict, NobodyListens, OutOfFiles, Pauses, RouterConfig
from router.engines.backend import Backend

__all__ = ["Monitor"]

log = logging.getLogger(__name__)

EARLY_S = 0.005  # timers may fire this early
RECHECK_S, LONGEST_RECHECK_S = 0.05, 0.4  # pauses after failed checks of an engine not yet down
LONGEST_PAUSE = 10  # intervals between checks of an engine that is down


class Monitor:
    """Checks one engine.

    `admit` is given the state that a running engine reports, and raises what keeps the engine from
    serving. `seen` is called with the state after that, and `lost`, with the reason, if the engine
    counts as down. `awake` counts the seconds in which this process ran, as only in these an engine
    can be silent.
    """

    def __init__(
        self,
        backend: Backend,
        config: RouterConfig,
        *,
        admit: Callable[[Backend, EngineState], Awaitable[None]],
        seen: Callable[[Backend, EngineState], None],
        lost: Callable[[Backend, str], None],
        awake: Callable[[], float],
    ) -> None:
        self._backend = backend
        self._config = config
        self._admit, self._seen, self._lost = admit, seen, lost
        self._awake = awake
        interval = config.health_interval_s
        self._pauses = Pauses(interval, LONGEST_PAUSE * interval)
        self._answered: float | None = None  # when the last check succeeded (on `awake`)
        self._unchecked = False  # this process could not connect, the last time

    async def check(self) -> float:
        """Find out whether the engine is up; return the pause until the next check (s).

        An engine is down if its address refuses connections, if it may not serve, or if all checks
        within `health_timeout_s` fail.
        """
        backend, config, clock = self._backend, self._config, self._awake
        give_up = clock() + config.health_timeout_s
        rechecks = Pauses(RECHECK_S, LONGEST_RECHECK_S)
        reason = f"silent for {config.health_timeout_s:g} s"
        while True:
            backend.probe.clear()
            doubts = backend.doubts
            try:
                async with asyncio.timeout(max(give_up - clock(), RECHECK_S)):
                    await backend.client.health()
                    backend.load.listen()
                    state = await backend.client.state()
                await self._admit(backend, state)
                if backend.doubts != doubts:  # the answer may be older than what has failed
                    give_up = clock() + config.health_timeout_s
                    continue
                self._seen(backend, state)
            except (NobodyListens, Conflict) as error:
                # A check costs nothing here, and an engine that restarts is wanted soon.
                self._lost(backend, error.message)
                return config.health_interval_s
            except OutOfFiles as error:  # says nothing about the engine
                if not self._unchecked:
                    log.warning("engine %s cannot be checked: %s", backend.id, error)
                self._unchecked = True
                return config.health_interval_s
            except (MicroserveError, TimeoutError) as error:
                reason = str(error) or reason
                if (left := give_up - clock()) > EARLY_S:
                    await asyncio.sleep(min(rechecks.next(), left))
                    continue
            except Exception as error:  # concerns this engine only; the router must go on
                log.exception("the health check of engine %s failed", backend.id)
                reason = f"the router failed to check it: {type(error).__name__}: {error}"
            else:
                self._unchecked = False
                self._note_answer(clock())
                return config.health_interval_s
            self._lost(backend, reason)
            return self._pauses.next()

    def _note_answer(self, now: float) -> None:
        """End what the engine is silent about. Time without checks, or between late ones, is not
        counted."""
        elapsed = now - self._answered if self._answered is not None else 0.0
        self._answered = now
        self._pauses.reset()
        elapsed = min(elapsed, 2 * self._config.health_interval_s)
        self._backend.end_silent(elapsed, self._config.engine_silence_s)
