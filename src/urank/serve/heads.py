"""HTTP as uvicorn speaks it with httptools, but for heads of requests without an end: those are cut off."""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

__all__ = ["BoundedHeads"]

MAX_HEAD = 64 * 2**10
_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/problem+json\r\n"
    b"content-length: 100\r\nconnection: close\r\n\r\n"
    b'{"type":"about:blank","title":"Request Header Fields Too Large","status":431,"detail":"a long head"}'
)


class BoundedHeads(HttpToolsProtocol):
    """Closes a connection whose request goes on for longer than `MAX_HEAD` before its body begins.

    httptools keeps all of a head, whoever sends it and before any key is asked for.
    """

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._in_head = True
        self._head = 0

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self._in_head:
            return
        self._head += len(data)
        if self._head > MAX_HEAD and not self.transport.is_closing():
            self.transport.write(_TOO_LARGE)
            self.transport.close()

    def on_message_begin(self) -> None:
        self._in_head, self._head = True, 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head = False
        super().on_headers_complete()
