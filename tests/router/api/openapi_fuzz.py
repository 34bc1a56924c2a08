"""Check a running router against its `/openapi.json` with schemathesis.

python tests/router/api/openapi_fuzz.py URL EXAMPLES    # to run it by hand
"""

from __future__ import annotations

import sys
from typing import Any

import hypothesis
import schemathesis
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
SMALL = {"max_tokens": 2, "max_completion_tokens": 2, "min_tokens": 1, "n": 2}


def fuzz(url: str, examples: int) -> int:
    """Call every operation with `examples` valid bodies and as many invalid ones.

    Return the number of calls. Raises schemathesis' errors for replies that break the schema.
    """
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    calls = 0
    for result in schema.get_all_operations():
        operation = result.ok()
        replies = operation.definition.raw["responses"]
        done = next(reply for status, reply in replies.items() if status.startswith("2"))
        if list(done["content"]) == ["text/event-stream"]:
            continue  # an event stream does not end
        for mode in GenerationMode:
            if operation.method == "get" and mode is GenerationMode.NEGATIVE:
                continue  # a GET has no body to invalidate

            @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
            @hypothesis.settings(
                max_examples=examples,
                deadline=None,
                derandomize=True,
                database=None,
                suppress_health_check=list(hypothesis.HealthCheck),
            )
            def run(case: Any) -> None:
                nonlocal calls
                calls += 1
                _shorten(case)
                case.call_and_validate(checks=CHECKS, timeout=60)

            try:
                run()
            except hypothesis.errors.Unsatisfiable:
                continue  # the operation has no invalid input
    return calls


def _shorten(case: Any) -> None:
    """Bound output lengths and raise timeouts, so that the calls are fast and succeed."""
    body = case.body
    if not isinstance(body, dict) or "completions" not in case.path:
        return
    for name, most in SMALL.items():
        if type(body.get(name)) is int:
            body[name] = min(body[name], most)
    if type(body.get("timeout")) in (int, float) and body["timeout"] > 0:
        body["timeout"] = 60  # a short timeout would correctly give a 504
    if "chat" in case.path and not body.get("max_tokens"):
        body.setdefault("max_completion_tokens", 2)


if __name__ == "__main__":
    print(fuzz(sys.argv[1], int(sys.argv[2])), "calls")
