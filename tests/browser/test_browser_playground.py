"""The page's playground: a streamed answer, the times of its tokens, its receipt, and its key."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from browser_fleet import BrowserFleet, until

KEY = "a client's key"
HOSTILE = "</textarea><img src=x onerror=hacked()><b>bold</b>"
STEP_MS = 40
HACKED = "() => { window.hacked = () => { throw new Error('hacked') } }"


@pytest.fixture(scope="module")
def fleet() -> Iterator[BrowserFleet]:
    flags = ("--step-ms", str(STEP_MS), "--prefill-tokens-per-ms", "50")
    fleet = BrowserFleet("--api-key", KEY, engine_flags=flags)
    yield fleet
    fleet.close()


def entered(pages: Any, fleet: BrowserFleet) -> Any:
    pages.expected = lambda problem: "401" in problem  # what the browser says of the first call
    page = pages.open(f"{fleet.url}/#/playground")
    page.evaluate(HACKED)
    page.get_by_role("dialog").get_by_text("This router's API needs a key.").wait_for()
    page.get_by_label("Key", exact=True).fill(KEY)
    page.get_by_role("button", name="Continue").click()
    page.get_by_role("dialog").wait_for(state="detached")
    return page


def ask(page: Any, prompt: str, tokens: int) -> Any:
    """Send a message; return what locates the answer."""
    page.get_by_label("Max tokens").fill(str(tokens))
    page.get_by_label("Message").fill(prompt)
    page.get_by_label("Message").press("Enter")
    return page.locator(".turn-assistant .turn-text").last


def receipt_of(page: Any, fleet: BrowserFleet) -> dict[str, Any]:
    link = page.locator(".facts a")
    link.wait_for()
    path = f"/admin/requests/{link.inner_text()}"
    until(lambda: fleet.get(path)["status"] != "running")  # a stop takes a while to be noticed
    receipt: dict[str, Any] = fleet.get(path)
    return receipt


def test_tokens_stream_and_the_receipt_stands_beside_them(pages: Any, fleet: BrowserFleet):
    page = entered(pages, fleet)
    answer = ask(page, HOSTILE, 50)
    first = until(answer.inner_text)
    assert page.get_by_role("button", name="Stop").count() == 1
    until(lambda: len(answer.inner_text()) > len(first))
    assert page.locator(".facts").count() == 0  # the answer still comes
    receipt = receipt_of(page, fleet)
    assert (receipt["status"], receipt["completion_tokens"]) == ("done", 50)
    assert page.locator(".turn-assistant").get_by_text("50 tokens in").count() == 1
    assert page.locator(".turn-assistant").get_by_text("length").count() == 1

    facts = page.locator(".facts").inner_text()
    assert "data_parallel" in facts and f"{receipt['prompt_tokens']} tokens" in facts
    legs = page.get_by_role("region", name="Legs").locator("tbody tr")
    assert legs.count() == len(receipt["legs"]) == 1
    assert (
        "start_generate" in legs.inner_text() and receipt["legs"][0]["engine"] in legs.inner_text()
    )

    # A step has one token. Steps that the browser gets together have one time.
    bars = page.locator(".token-chart rect title").all_text_contents()
    assert len(bars) == 49 and bars[0].startswith("Token 2: ") and bars[-1].startswith("Token 50: ")
    middle = page.locator(".stat", has_text="Per token, p50").locator(".stat-value").inner_text()
    value, unit = middle.split()
    assert float(value) * {"ms": 1, "s": 1000}[unit] > STEP_MS / 2

    assert page.locator(".turn-user .turn-text").inner_text() == HOSTILE
    assert page.locator("img[src=x], .turns b:has-text('bold')").count() == 0
    page.locator(".facts a").click()
    page.get_by_role("heading", name="Requests", level=1).wait_for()
    page.go_back()  # the conversation is still there
    assert page.locator(".turn").count() == 2


def test_an_answer_is_stopped_and_asked_again(pages: Any, fleet: BrowserFleet):
    page = entered(pages, fleet)
    answer = ask(page, "Go on and on", 2000)
    until(answer.inner_text)
    page.get_by_role("button", name="Stop").click()
    page.locator(".turn-assistant").get_by_text("stopped").wait_for()
    stopped = receipt_of(page, fleet)
    assert stopped["status"] == "cancelled"
    page.get_by_label("Max tokens").fill("5")
    page.get_by_role("button", name="Ask again").click()
    page.locator(".turn-assistant").get_by_text("5 tokens in").wait_for()
    assert page.locator(".turn").count() == 2
    assert receipt_of(page, fleet)["id"] != stopped["id"]


def test_sampling_goes_with_the_request_and_wrong_values_are_marked(
    pages: Any, fleet: BrowserFleet
):
    page = entered(pages, fleet)
    sent: list[dict[str, Any]] = []
    page.on(
        "request", lambda one: one.url.endswith("completions") and sent.append(one.post_data_json)
    )
    pages.expected = lambda problem: bool(re.search("40[01]", problem))
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Temperature").fill("9")
    ask(page, "hello", 4)
    page.get_by_label("Temperature").and_(page.locator("[aria-invalid]")).wait_for()
    assert "temperature" in page.locator(".turn-assistant .notice").inner_text()
    page.get_by_label("Temperature").fill("0.5")
    page.get_by_text("More sampling").click()
    page.get_by_label("Top p").fill("0.9")
    page.get_by_label("Seed").fill("7")
    page.get_by_label("Stop", exact=True).fill("one\ntwo")
    page.get_by_role("button", name="Ask again").click()
    page.locator(".turn-assistant").get_by_text("4 tokens in").wait_for()
    assert [one["role"] for one in sent[-1]["messages"]] == ["system", "user"]
    assert sent[-1] | {"messages": [], "model": ""} == {
        "messages": [], "model": "", "max_tokens": 4, "temperature": 0.5, "top_p": 0.9, "seed": 7,
        "stop": ["one", "two"], "stream": True, "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }  # fmt: skip
    assert receipt_of(page, fleet)["seed"] == 7


def test_a_key_is_changed_in_the_settings(pages: Any, fleet: BrowserFleet):
    page = entered(pages, fleet)
    page.get_by_text("More sampling, API key").click()
    page.get_by_label("API key").fill("a wrong one")
    page.get_by_role("button", name="Change").click()
    ask(page, "hello", 3)
    page.get_by_text("The router refused this key.").wait_for()
    page.get_by_label("Key", exact=True).fill(KEY)
    page.get_by_role("button", name="Continue").click()
    page.locator(".turn-assistant").get_by_text("3 tokens in").wait_for()
    assert not [url for url in pages.urls if "key" in url]
