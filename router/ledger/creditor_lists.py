"""Whom each debtor should ask, told to it again and again (Infinite-LLM, section 4.4)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass

from engine.protocol import Creditor, LendCreditors, MicroserveError
from router.base import EngineId
from router.ledger.debtor import Debtor
from router.ledger.ledger import Ledger

__all__ = ["CreditorLists"]

log = logging.getLogger(__name__)

REPEAT_S = 2.0  # a list that has not changed is sent again after so long
SEND_S = 2.0  # for a debtor's answer


@dataclass(slots=True)
class _Told:
    """What a debtor was told last."""

    order: tuple[tuple[str, int, str], ...]  # the creditors: name, epoch and URL
    at: float  # seconds, on the event loop's clock


class CreditorLists:
    """Sends each debtor its list when it has changed, and every few seconds.

    A list has three creditors at most, as in the paper, in the order of `Ledger.creditors`. It is
    as old as the heartbeats that it is made of; creditors decide by themselves.
    """

    def __init__(
        self,
        ledger: Ledger,
        debtors: Callable[[], Iterable[Debtor]],
        url_of: Callable[[EngineId], str],
        tasks: asyncio.TaskGroup,
    ) -> None:
        """`debtors` returns the engines that borrow now.

        `url_of` returns the URL at which an engine is reached, empty for an unknown one.
        """
        self._ledger, self._debtors, self._url_of = ledger, debtors, url_of
        self._tasks, self._closed = tasks, False
        self._told: dict[tuple[EngineId, int], _Told] = {}
        self._sending: dict[tuple[EngineId, int], asyncio.Task[None]] = {}

    def list_for(self, debtor: Debtor) -> LendCreditors:
        """Return whom a debtor should ask for a block."""
        found = []
        for each in self._ledger.creditors(debtor.instance, debtor.block_pages):
            with suppress(ValueError):  # the debtor would refuse a URL of another form
                found.append(
                    Creditor(
                        instance=each.instance,
                        epoch=each.epoch,
                        url=self._url_of(each.instance),
                        available=each.available,
                    )
                )
        return LendCreditors(creditors=found)

    def send(self) -> None:
        """Send what debtors have to be told now, in tasks that take `SEND_S` at most.

        Call it when the ledger or the fleet has changed.
        """
        if self._closed:
            return
        now = asyncio.get_running_loop().time()
        debtors = {(each.instance, each.epoch): each for each in self._debtors()}
        self._told = {key: told for key, told in self._told.items() if key in debtors}
        for key, debtor in debtors.items():
            if key in self._sending:
                continue
            wanted = self.list_for(debtor)
            order = tuple((each.instance, each.epoch, each.url) for each in wanted.creditors)
            told = self._told.get(key)
            if told is None or told.order != order or now - told.at >= REPEAT_S:
                self._told[key] = _Told(order, now)
                self._sending[key] = self._tasks.create_task(self._send(key, debtor, wanted))

    def close(self) -> None:
        """Send nothing further."""
        self._closed = True
        for task in self._sending.values():
            task.cancel()

    async def _send(self, key: tuple[EngineId, int], debtor: Debtor, wanted: LendCreditors) -> None:
        try:
            async with asyncio.timeout(SEND_S):
                await debtor.set_creditors(wanted)
        except (MicroserveError, TimeoutError) as error:
            self._told.pop(key, None)  # it is sent again with the next change or health check
            log.info("%s was not told its creditors: %s", debtor.instance, error)
        except Exception:
            log.exception("%s was not told its creditors", debtor.instance)
        finally:
            self._sending.pop(key, None)
