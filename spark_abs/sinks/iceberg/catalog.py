"""The catalog of an Iceberg sink, with properties from the environment, which messages must not show."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import cast

from pydantic import ValidationError
from pyiceberg import exceptions
from pyiceberg.catalog import (
    _ENV_CONFIG,
    PY_CATALOG_IMPL,
    TYPE,
    URI,
    Catalog,
    CatalogType,
    infer_catalog_type,
    load_catalog,
)
from pyiceberg.catalog.rest import RestCatalog
from pyiceberg.utils.config import merge_config
from requests import Session

from spark_abs.errors import UsageError
from spark_abs.sinks.environment import object_in, without_secrets

_SECRET = ("password", "secret", "token", "credential", "access-key", "session", "uri", "auth")
REFUSED = (
    exceptions.NoSuchTableError,
    exceptions.NoSuchNamespaceError,
    exceptions.ForbiddenError,
    exceptions.UnauthorizedError,
    exceptions.BadRequestError,
    exceptions.ValidationException,
    exceptions.NotInstalledError,
)
"""Errors that would occur again; all others are retried."""


@dataclass(frozen=True, slots=True)
class Reached:
    """A catalog, and the secrets that no message may show."""

    catalog: Catalog
    secrets: tuple[str, ...] = field(repr=False)

    def clean(self, text: str) -> str:
        """Return a text without the secrets in it."""
        return without_secrets(text, self.secrets)


def reach(name: str, env: str | None) -> Reached:
    """Open the catalog of a name, with properties from a variable of the environment if one is named.

    Raises:
        UsageError: the environment does not say where it is.
        ValidationError: its answer cannot be read.
    """
    given: Mapping[str, object] = {}
    text = ""
    if env is not None:
        what = 'properties of a catalog, as {"type": "sql", "uri": "…", "warehouse": "…"}'
        given, text = object_in(env, str, what)
    try:
        catalog = _open(name, {key: str(value) for key, value in given.items()})
    except ValidationError:  # a ValueError, too
        raise
    except ValueError:
        raise UsageError(
            f"no address of catalog {name!r}: set PYICEBERG_CATALOG__{name.upper()}__URI, or "
            "give Iceberg(…, catalog_env=…)"
        ) from None
    known = {**catalog.properties, **given}
    hidden = {str(value) for key, value in known.items() if any(word in key.lower() for word in _SECRET)}
    return Reached(catalog, (text, *hidden))


def _open(name: str, given: dict[str, str]) -> Catalog:
    """Open a catalog as `load_catalog` does; one over REST with timeouts."""
    found = cast("dict[str, str]", merge_config(_ENV_CONFIG.get_catalog_config(name) or {}, {**given}))
    if PY_CATALOG_IMPL not in given and URI in found:
        inferred = None if found.get(TYPE) else infer_catalog_type(name, {**found})
        if inferred is CatalogType.REST or str(found.get(TYPE)).lower() == CatalogType.REST.value:
            # Half a second, which tasks do not need.

            return TimedRestCatalog(name, **found)
    return load_catalog(name, **given)


TIMEOUTS_S = (10.0, 60.0)
"""How long one waits for a connection, and for each part of an answer."""


class TimedRestCatalog(RestCatalog):
    """pyiceberg's REST catalog with timeouts from the first call on; adapters and logins are as they were."""

    def _config_headers(self, session: Session) -> None:
        # The first thing that is done with a session: a login through it comes after this.
        super()._config_headers(session)
        session.request = partial(session.request, timeout=TIMEOUTS_S)  # type: ignore[method-assign]
