"""`python -m engine.models NAME`: download a model before engines start.

`python -m engine.models --describe NAME` prints one JSON object instead: tokenizer, chat template
and sizes, for a router in front of servers that do not tell them. Its weights are not needed.

Exits with status 0, or with status 1 and the reason on stderr.
"""

from __future__ import annotations

import sys

from engine.models.errors import ModelError
from engine.models.loading.locate import prepare_model

__all__ = ["main"]


def main(arguments: list[str]) -> None:
    try:
        match arguments:
            case ["--describe", name]:
                _describe(name)
            case [name]:
                prepare_model(name)
            case _:
                raise SystemExit("usage: python -m engine.models [--describe] NAME")
    except ModelError as error:
        raise SystemExit(str(error)) from error


def _describe(name: str) -> None:
    # Imported here: it imports torch, which takes seconds.
    from engine.models.loading.description import describe

    sys.stdout.buffer.write(describe(name).to_json())


if __name__ == "__main__":
    main(sys.argv[1:])
