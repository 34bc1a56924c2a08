"""A prefix is migrated in a real deployment: one engine takes over another's topic (Example 4)."""

from __future__ import annotations

import httpx
import pytest
from e2e_deployment import Deployment
from e2e_faults import until

NEW = 16


@pytest.mark.parametrize("strategy", ["cache_aware", "migrate"])
def test_a_topic_is_moved_to_another_engine(tiny: Deployment, strategy: str):
    salt = len(strategy)
    topic = [(salt * i * i + 17 * i) % 500 + 1 for i in range(330)]
    questions = [[*topic, 1, 2, 3], [*topic, 4, 5, 6]]
    with httpx.Client(base_url=tiny.url, headers=tiny.admin, timeout=60) as http:

        def drain(engine: str, draining: bool) -> None:
            http.patch(f"/admin/engines/{engine}", json={"draining": draining}).raise_for_status()

        def ask(prompt: list[int]) -> tuple[list[int], dict[str, object]]:
            answer = tiny.complete(prompt, greedy=NEW, model="tiny")
            (leg,) = tiny.receipt(answer["request_id"])["legs"]
            return answer["choices"][0]["token_ids"], leg

        tiny.use(strategy)
        # A poll while a test before asked an engine directly makes that another router's work.
        until(lambda: not any(any(one["load"].values()) for one in tiny.members()), "no load")
        first, leg = ask(questions[0])
        source = leg["engine"]
        target = next(engine.id for engine in tiny.engines if engine.id != source)
        body = {"prefix": topic, "from": source, "to": target, "pin": True}
        moved = http.post("/admin/migrate", json=body)
        assert moved.status_code == 200, moved.text
        assert moved.json()["tokens"] == moved.json()["sent_tokens"] == 320
        drain(source, True)
        try:
            answers = []
            for question in questions:
                tokens, leg = ask(question)
                place = leg["engine"], leg["begin"], leg["computed_tokens"]
                assert place == (target, 320, 13), [one["load"] for one in tiny.members()]
                answers.append(tokens)
        finally:
            drain(source, False)
    assert answers[0] == first
    oracle = next(engine for engine in tiny.engines if engine.id not in (source, target))
    request_id = f"topic-{strategy}"
    assert answers[1] == oracle.generate(questions[1], greedy=NEW, request_id=request_id)
