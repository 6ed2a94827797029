"""A REST catalog whose calls end, also where no answer comes: pyiceberg's own waits for ever."""

from __future__ import annotations

from functools import partial

from pyiceberg.catalog.rest import RestCatalog
from requests import Session

TIMEOUTS_S = (10.0, 60.0)
"""How long one waits for a connection, and for each part of an answer."""


class TimedRestCatalog(RestCatalog):
    """pyiceberg's REST catalog with timeouts from the first call on; adapters and logins are as they were."""

    def _config_headers(self, session: Session) -> None:
        # The first thing that is done with a session: a login through it comes after this.
        super()._config_headers(session)
        session.request = partial(session.request, timeout=TIMEOUTS_S)  # type: ignore[method-assign]
