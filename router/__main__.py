"""`python -m router` is `microserve`."""

from router.cli import main

main()
