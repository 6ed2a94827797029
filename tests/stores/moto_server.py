"""moto's server of S3, one request at a time: moto itself checks a condition and writes later.

It knows one access key. With the argument `lax` it is a store that ignores the condition of a write.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from threading import Lock
from typing import Any

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import run_simple

_REFUSAL = b"<Error><Code>InvalidAccessKeyId</Code><Message>The key is not known.</Message></Error>"
_lax = "lax" in sys.argv
_alone = Lock()
_moto = DomainDispatcherApplication(create_backend_app)


def application(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
    """Answer a request."""
    if "Credential=tests/" not in environ.get("HTTP_AUTHORIZATION", "Credential=tests/"):
        start_response("403 Forbidden", [("Content-Type", "application/xml")])
        return [_REFUSAL]
    if _lax:
        environ.pop("HTTP_IF_NONE_MATCH", None)
    with _alone:
        return list(_moto(environ, start_response))


if __name__ == "__main__":
    run_simple("127.0.0.1", int(sys.argv[1]), application, threaded=True)
