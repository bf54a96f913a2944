"""What stands between a client and a server: a load balancer, a firewall, a proxy, which may forget connections."""

from __future__ import annotations

import contextlib
import socket
import threading


class Middlebox:
    """Passes connections on to the server behind the Unix socket ``path``."""

    def __init__(self, path: str) -> None:
        self.path = path
        #: How many connections were made so far.
        self.made = 0
        #: What is told to new connections: nothing for ever, if set.
        self.silent = False
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._forgotten: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def __enter__(self) -> Middlebox:
        return self

    def __exit__(self, *exc_info: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for pair in self._pairs:
            for each in pair:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
                each.close()

    def forget(self) -> None:
        """From now on, what comes on a connection that is open now is swallowed, in both directions, for ever."""
        for pair in list(self._pairs):
            self._forgotten.update(pair)

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.socket(socket.AF_UNIX)
            self.made += 1
            try:
                server.connect(self.path)
            except OSError:
                client.close()
                continue
            pair = (client, server)
            if self.silent:
                self._forgotten.update(pair)
            self._pairs.append(pair)
            for ends in (pair, pair[::-1]):
                threading.Thread(target=self._pass_on, args=ends, daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if source not in self._forgotten:
                    sink.sendall(data)
            if source not in self._forgotten:  # else not even the end is told
                sink.shutdown(socket.SHUT_RDWR)
