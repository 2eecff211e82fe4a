"""What is known of a loader that a script makes anew, by its site: the same line, kind of data and batch size.

AutoLoader keeps a configuration here, which the next loader of the site tries first; `watch` keeps its record of the
site. It is never evidence about the data, and two loaders that live at once never share it.
"""

from __future__ import annotations

import weakref
from typing import Any, Generic, TypeVar

from autotune_loader.pipeline.site import NOWHERE, Site

MOST_KNOWN = 256
"""Sites of a process that are remembered, the latest."""

V = TypeVar("V")


class Registry(Generic[V]):
    """One value for each site. No loader is kept alive."""

    def __init__(self) -> None:
        self._known: dict[Site, list[tuple[weakref.ref[Any], V]]] = {}

    def find(self, site: Site, loader: Any) -> V | None:
        """What was kept for this loader, or for one of the same site that is gone; None where there is nothing."""
        known = self._known.get(site, [])
        gone = [value for owner, value in known if owner() is None]
        return next((value for owner, value in known if owner() is loader), gone[-1] if gone else None)

    def keep(self, site: Site, loader: Any, value: V) -> None:
        """From now on this is the loader's; what one that is gone has left at the site goes."""
        if site.line == NOWHERE:
            return
        others = [
            each for each in self._known.pop(site, ()) if (owner := each[0]()) is not None and owner is not loader
        ]
        self._known[site] = [*others, (weakref.ref(loader), value)]
        while len(self._known) > MOST_KNOWN:
            del self._known[next(iter(self._known))]
