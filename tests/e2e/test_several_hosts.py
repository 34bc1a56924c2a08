"""Engines on different hosts: KV goes over the network, hosts die and are cut off."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

import httpx
import pytest
from e2e_deployment import Deployment
from e2e_faults import Alone, prompt_of
from e2e_hosts import KV_PORTS, REST_PORT, Host, fleet, hosts, wait_for
from e2e_wire import within

STRATEGIES = ("data_parallel", "prefill_decode", "balanced", "cache_aware", "migrate", "replicate")
CLIENT = {"Authorization": "Bearer clients"}
NEW = 150  # tokens of a request under faults
ANSWER = 3000  # of one that is still running when something is cut off
T = TypeVar("T")


@dataclass
class Fleet:
    """Engines on hosts behind one router."""

    hosts: list[Host]
    deployment: Deployment
    folder: Path
    answers: list[Answer] = field(default_factory=list)

    def ask(self, prompt: list[int], new: int = NEW) -> Answer:
        answer = Answer(self.deployment.url, prompt, new)
        self.answers.append(answer)
        return answer

    def at_rest(self) -> None:
        """A release that was lost with its host is made up for by the lease's end."""
        deadline = time.monotonic() + 40
        for engine in self.deployment.engines:
            while engine.state()["leases"] and time.monotonic() < deadline:
                time.sleep(0.2)
            engine.check_at_rest()


class Answer:
    """A streamed completion in a thread of its own."""

    def __init__(self, url: str, prompt: list[int], new: int) -> None:
        self.prompt, self.new = prompt, new
        self.tokens: list[int] = []
        self.error = ""
        self.id = ""
        self._url = url
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()

    def runs(self) -> bool:
        return self._thread.is_alive()

    def wait(self) -> Answer:
        self._thread.join(120)
        assert not self._thread.is_alive()
        return self

    def _run(self) -> None:
        body = {"model": "tiny", "prompt": self.prompt, "max_tokens": self.new, "temperature": 0,
                "ignore_eos": True, "return_token_ids": True, "stream": True}  # fmt: skip
        try:
            with httpx.stream(
                "POST", f"{self._url}/v1/completions", json=body, headers=CLIENT, timeout=110,
                verify=False,
            ) as reply:  # fmt: skip
                self.id = reply.headers.get("x-request-id", "")
                if reply.status_code != 200:
                    self.error = str(reply.read())
                    return
                for line in reply.iter_lines():
                    self._receive(line)
        except httpx.HTTPError as error:
            self.error = repr(error)

    def _receive(self, line: str) -> None:
        if line.startswith("data: {"):
            event = json.loads(line[6:])
            if "error" in event:
                self.error = str(event["error"])
            for choice in event.get("choices", ()):
                self.tokens += choice.get("token_ids") or []


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("hosts")
    with hosts(3) as made, fleet(made, folder, "--health-timeout", "1.5") as deployment:
        yield Fleet(made, deployment, folder)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_strategy_across_hosts_gives_the_tokens_of_one_engine(
    three: Fleet, alone: Alone, strategy: str
):
    three.deployment.use(strategy)
    asked = [three.ask(prompt_of(f"{strategy}{n}", 90 + 40 * n), 12) for n in range(3)]
    for answer in asked:
        assert answer.wait().error == ""
        assert answer.tokens == alone(answer.prompt, 12)
    three.at_rest()
    if strategy == "prefill_decode":
        receipt = three.deployment.receipt(asked[0].id)
        assert any(leg.get("bytes") for leg in receipt["legs"]), receipt
        only_the_ports_that_were_given_are_open(three.hosts)


def only_the_ports_that_were_given_are_open(hosts: list[Host]) -> None:
    """After a put, each host listens for calls and, at ports of `--kv-ports`, for KV."""
    for host in hosts:
        found = host.listening()
        assert (host.address, REST_PORT) in found
        for_kv = {port for _, port in found} - {REST_PORT}
        assert for_kv and for_kv <= set(KV_PORTS), found


def faults() -> dict[str, Callable[[Fleet], None]]:
    def killed(fleet: Fleet) -> None:
        victim = fleet.hosts[1]
        victim.kill()
        time.sleep(3)
        victim.start(fleet.deployment.url, fleet.folder / "again.log")

    def frozen(fleet: Fleet) -> None:
        fleet.hosts[1].freeze()
        time.sleep(4)
        fleet.hosts[1].thaw()

    def cut_off(fleet: Fleet) -> None:
        fleet.hosts[1].cut_off()
        time.sleep(5)
        fleet.hosts[1].heal()

    def mute(fleet: Fleet) -> None:
        fleet.hosts[1].lose_sent()
        time.sleep(5)
        fleet.hosts[1].heal()

    def lossy(fleet: Fleet) -> None:
        fleet.hosts[1].squeeze("4mbit")
        time.sleep(6)
        fleet.hosts[1].heal()

    return {each.__name__: each for each in (killed, frozen, cut_off, mute, lossy)}


@pytest.mark.thorough
@pytest.mark.timeout(400)
@pytest.mark.parametrize("fault", list(faults()))
@pytest.mark.parametrize("strategy", ["prefill_decode", "balanced", "replicate"])
def test_a_fault_between_hosts_fails_and_changes_nothing(
    three: Fleet, alone: Alone, strategy: str, fault: str
):
    """Requests begin before, during and after the fault; the strategy changes in the middle."""
    three.deployment.use(strategy)
    asked: list[Answer] = []

    def load(number: int) -> None:
        for each in range(number):
            asked.append(three.ask(prompt_of(f"{strategy}{fault}{len(asked)}", 60 + 30 * each)))
            time.sleep(0.15)

    load(5)
    breaking = Thread(target=faults()[fault], args=(three,))
    breaking.start()
    time.sleep(0.3)
    load(3)
    three.deployment.use("replicate" if strategy != "replicate" else "prefill_decode")
    load(3)
    breaking.join()
    wait_for(three.deployment, 3, three.folder)
    load(2)
    outcomes = [
        (answer.wait().error, answer.tokens == alone(answer.prompt, NEW)) for answer in asked
    ]
    assert outcomes == [("", True)] * len(asked), [each for each in outcomes if each[0]]
    three.at_rest()


LONG = 3000  # tokens of a prompt whose KV takes seconds at `SLOW`
SLOW = "4mbit"
MUCH = 500_000  # bytes: more than a prompt and all calls, a seventh of that KV
WAYS = ["cut_off", "lose_sent"]  # in both directions, in one


def moment(condition: Callable[[], T | None], within_s: float = 60) -> T:
    """Poll until a moment has come."""
    deadline = time.monotonic() + within_s
    while (found := condition()) is None:
        assert time.monotonic() < deadline, "the moment did not come"
    return found


def in_the_middle_of_a_put(fleet: Fleet, name: str) -> tuple[Answer, dict[str, Host]]:
    """Ask until KV is on its way to an engine; return that answer, the receiver and the sender.

    On a busy machine an engine may miss health checks. Then the request goes on without that put.
    """
    deadline = time.monotonic() + 150
    while time.monotonic() < deadline:
        answer = fleet.ask(prompt_of(f"{name}{len(fleet.answers)}", LONG), 12)
        if ends := ends_of_put(fleet, answer):
            return answer, ends
    raise AssertionError("no put was seen")


def ends_of_put(fleet: Fleet, answer: Answer) -> dict[str, Host]:
    """Wait for a put of which much has come; return nothing if the answer ends before."""
    received = {host.name: host.received_bytes() for host in fleet.hosts}

    def seen() -> dict[str, Host] | None:
        states = [(host, host.state()) for host in fleet.hosts]
        receivers = [host for host, state in states if unfinished(state)]
        senders = [host for host, state in states if state["puts_in_flight"]]
        for receiver in receivers:
            if senders and receiver.received_bytes() - received[receiver.name] >= MUCH:
                return {"receiver": receiver, "sender": senders[0]}
        return None if answer.runs() else {}

    return moment(seen, 100)


def unfinished(state: dict[str, Any]) -> bool:
    return any(one["landed"] < one["end"] for one in state["leases"])


@contextmanager
def broken(victim: Host, way: str) -> Iterator[None]:
    """Cut a host off; it is healed in the end, so that the next test finds a whole fleet."""
    getattr(victim, way)()
    try:
        yield
    finally:
        victim.heal()


def survives(fleet: Fleet, asked: list[Answer], alone: Alone, victim: Host) -> None:
    """Check that no answer failed or differs, and that nothing is left after healing."""
    try:
        outcomes = [(one.wait().error, one.tokens == alone(one.prompt, one.new)) for one in asked]
        assert outcomes == [("", True)] * len(asked)
    finally:
        victim.heal()
    wait_for(fleet.deployment, 3, fleet.folder)
    fleet.at_rest()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "way"),
    [
        ("receiver", "cut_off"),
        *(
            pytest.param(*case, marks=pytest.mark.thorough)
            for case in [("receiver", "lose_sent"), ("sender", "cut_off"), ("sender", "lose_sent")]
        ),
    ],
)
def test_a_host_that_is_cut_off_in_the_middle_of_a_put(
    three: Fleet, alone: Alone, end: str, way: str
):
    three.deployment.use("prefill_decode")
    three.ask(prompt_of(f"first{end}{way}", 300), 4).wait()  # a first put also connects
    for host in three.hosts:
        host.squeeze(SLOW)
    answer, ends = in_the_middle_of_a_put(three, f"{end}{way}")
    victim = ends[end]
    with broken(victim, way):
        assert unfinished(ends["receiver"].state()), "the put has ended before the cut"
        for host in three.hosts:
            if host is not victim:
                host.heal()
        survives(three, [answer], alone, victim)
    receipt = three.deployment.receipt(answer.id)
    assert receipt["retries"], receipt


@pytest.mark.thorough
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("strategy", ["data_parallel", "prefill_decode", "replicate"])
def test_a_host_that_is_cut_off_in_the_middle_of_a_decode(
    three: Fleet, alone: Alone, strategy: str, way: str
):
    three.deployment.use(strategy)
    answer = three.ask(prompt_of(f"decode{strategy}{way}", 200), ANSWER)
    moment(lambda: len(answer.tokens) > 8 or None)
    victim = moment(lambda: next((h for h in three.hosts if h.engine.state()["running"]), None))
    with broken(victim, way):
        assert victim.state()["running"] and len(answer.tokens) < ANSWER, "it ended before the cut"
        survives(three, [answer], alone, victim)


@pytest.mark.thorough
@pytest.mark.parametrize("way", WAYS)
def test_a_host_that_is_cut_off_while_requests_of_two_generations_run(
    three: Fleet, alone: Alone, way: str
):
    three.deployment.use("prefill_decode")
    old = [three.ask(prompt_of(f"old{way}{n}", 200), ANSWER) for n in range(3)]
    moment(lambda: all(len(one.tokens) > 4 for one in old) or None)
    now = three.deployment.use("replicate")
    new = [three.ask(prompt_of(f"new{way}{n}", 200), ANSWER) for n in range(3)]
    moment(lambda: all(len(one.tokens) > 4 for one in new) or None)
    victim = moment(lambda: next((h for h in three.hosts if h.engine.state()["running"]), None))
    with broken(victim, way):
        assert any(len(one.tokens) < ANSWER for one in old), "the old ones ended before the cut"
        assert victim.state()["running"]
        survives(three, [*old, *new], alone, victim)
    ran = [three.deployment.receipt(one.id)["generation"] for one in [*old, *new]]
    assert ran == [now - 1] * 3 + [now] * 3


@pytest.mark.thorough
@pytest.mark.parametrize(("delay_s", "loss"), [(0.03, 0.0), (0.0, 0.02), (0.01, 0.01)])
@pytest.mark.parametrize("strategy", ["prefill_decode", "balanced", "replicate"])
def test_a_bad_network_changes_nothing(
    three: Fleet, alone: Alone, strategy: str, delay_s: float, loss: float
):
    three.deployment.use(strategy)
    victim = three.hosts[0]
    wire = victim.worsen(delay_s, loss)
    try:
        asked = [three.ask(prompt_of(f"{strategy}{delay_s}{loss}{n}", 200), 100) for n in range(6)]
        survives(three, asked, alone, victim)
    finally:
        victim.heal()
    assert wire.moved and (wire.lost or not loss)


def test_a_wire_delays_and_loses() -> None:
    def connect(timeout: float = 5.0) -> float:
        began = time.monotonic()
        socket.create_connection((made[0].gateway, port), timeout).close()
        return time.monotonic() - began

    with hosts(1) as made, socket.create_server((made[0].gateway, 0)) as server:
        port = server.getsockname()[1]
        made[0].worsen(0.1, 0.0)
        assert within(made[0].name, connect) > 0.2  # there and back
        made[0].heal()
        made[0].worsen(0.0, 1.0)
        with pytest.raises(TimeoutError):
            within(made[0].name, lambda: connect(0.3))
        made[0].heal()
        within(made[0].name, connect)


def test_nothing_of_the_hosts_stays() -> None:
    with hosts(1) as made:
        name = made[0].name
        assert (Path("/run/netns") / name).exists()
    assert not (Path("/run/netns") / name).exists()
    with hosts(1):  # the bridge is gone with them: its name can be taken again
        pass
