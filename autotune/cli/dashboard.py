"""Serving Optuna's own view of a study until the user interrupts it."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import sys
import threading
from typing import TYPE_CHECKING
from wsgiref import simple_server

from autotune.errors import ConfigError

if TYPE_CHECKING:
    from optuna.storages import BaseStorage


class _Handler(simple_server.WSGIRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Print nothing: requests are not the user's concern."""


class _Server(socketserver.ThreadingMixIn, simple_server.WSGIServer):
    daemon_threads = True  # a browser's idle connection must not keep the server alive

    def __init__(self, host: str, port: int) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Handler)


def serve(storage: BaseStorage, name: str, host: str, port: int) -> None:
    """Answer `http://host:port/` with Optuna's dashboard of the storage, until Ctrl-C.

    Requests are answered in threads: an interrupt that arrives during a request in the main thread would be swallowed by
    `wsgiref`, which answers any exception with status 500.

    Raises:
        ConfigError: optuna-dashboard is not installed, or the address cannot be listened on.
    """
    try:
        from optuna_dashboard import wsgi
    except ImportError:
        raise ConfigError(
            "the dashboard needs optuna-dashboard, which is not installed; `pip install 'autotune-torch[dashboard]'` adds it"
        ) from None
    with contextlib.suppress(KeyboardInterrupt):
        application = wsgi(storage)
        try:
            with _Server(host, port) as server:
                server.set_app(application)
                threading.Thread(target=server.serve_forever, daemon=True).start()
                address = f"[{host}]" if ":" in host else host
                where = f"http://{address}:{server.server_port}/"
                print(f"{where} shows {name}; Ctrl-C ends it", file=sys.stderr, flush=True)
                threading.Event().wait()
        except OSError as error:
            raise ConfigError(
                f"cannot listen on port {port} of {host}: {error.strerror}; choose another --port or --host"
            ) from None
