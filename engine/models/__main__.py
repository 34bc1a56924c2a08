"""`python -m engine.models NAME`: download a model before engines start.

Exits with status 0, or with status 1 and the reason on stderr.
"""

from __future__ import annotations

import sys

from engine.models.errors import ModelError
from engine.models.loading.locate import prepare_model

__all__ = ["main"]


def main(arguments: list[str]) -> None:
    if len(arguments) != 1:
        raise SystemExit("usage: python -m engine.models NAME")
    try:
        prepare_model(arguments[0])
    except ModelError as error:
        raise SystemExit(str(error)) from error


if __name__ == "__main__":
    main(sys.argv[1:])
