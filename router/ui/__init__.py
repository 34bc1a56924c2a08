"""The page for browsers: its files, as they are served. Imports nothing of the router.

`static/` holds them: ES modules and style sheets that need no build step. `static/vendor/` has the
libraries of others, with their licences.
"""

from router.ui.assets import Asset, assets

__all__ = ["Asset", "assets"]
