"""Whether an AutoLoader still trains as its file says: what the callbacks of all frameworks do after an epoch."""

from __future__ import annotations

import logging
from typing import Any

from autotune_loader.live.loader import AutoLoader

log = logging.getLogger(__name__)


class Watch:
    """Says it once, as a warning, and keeps what was said."""

    said: str | None = None

    def look_at(self, loader: Any, path: str | None) -> None:
        """Compare a loader, if it is an AutoLoader, with a `loader.json`; None is the one that `load_config()` finds."""
        if self.said is None and isinstance(loader, AutoLoader):
            self.said = loader.check(path)
            if self.said is not None:
                log.warning(self.said)
