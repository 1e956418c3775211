"""HTML pages for operators: the recent answers of their tenant, explained and compared with full attention."""

import asyncio
import base64
import binascii
import contextlib
import time
from urllib.parse import urlsplit

from aiohttp import web

from fusionkv.gateway import explain
from fusionkv.gateway.auth.access import ADMIN_PAGES, Bearer
from fusionkv.gateway.config import GatewayConfig
from fusionkv.gateway.history import Record
from fusionkv.gateway.http import replies
from fusionkv.gateway.http.listener import Listener
from fusionkv.gateway.plan import Conversation
from fusionkv.gateway.servicer import GatewayServicer
from fusionkv.protos.gateway.v1 import gateway_pb2 as pb
from fusionkv.protos.runtime.errors import NotFound, PermissionDenied

# Pages show a tenant's documents: no scripts, no external resources, no framing, no caching.
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; form-action 'self'; "
    "frame-ancestors 'none'; base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
    # With "no-referrer", browsers would send the page's own form with `Origin: null`.
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-store",
}
# Makes browsers show a password prompt.
_CHALLENGE = 'Basic realm="FusionKV operators: any user name, and the token as the password", charset="UTF-8"'


class AdminServer(Listener):
    """Serves the gateway's history. If calls require a token, pages require an operator's token as the password."""

    name = "fusionkv-gateway-admin"

    def __init__(self, config: GatewayConfig, servicer: GatewayServicer, bearer: Bearer | None) -> None:
        super().__init__(config.admin_listen, config, bearer)
        assert servicer.history is not None
        self._servicer = servicer
        self._history = servicer.history
        names = "answers.html", "explain.html"
        self._list, self._page = (explain.template(name, "admin_listen", ValueError) for name in names)
        self.get("/", self.guarded(ADMIN_PAGES, self._answers, _bearer))
        self.get("/explain/{id}", self.guarded(ADMIN_PAGES, self._explained, _bearer))
        self.post("/explain/{id}/full", self.guarded(ADMIN_PAGES, self._compared, _bearer))

    def failed(self, error: Exception) -> web.Response:
        if isinstance(error, web.HTTPException):
            return web.Response(text=f"{error.reason}\n", status=error.status, headers=_HEADERS)
        replies.record(error)
        headers = {**_HEADERS, **replies.headers(error)}
        if "WWW-Authenticate" in headers:
            headers["WWW-Authenticate"] = _CHALLENGE
        return web.Response(text=f"{replies.message(error)}\n", status=replies.status(error), headers=headers)

    async def _answers(self, request: web.Request) -> web.Response:
        records = self._history.of(await self._servicer.tenant_salt())

        def page() -> str:
            answers = [
                {
                    "id": record.id,
                    "question": Conversation.of(record.request).question,
                    "corpus": record.request.corpus or "given passages",
                    "text": answer.text.strip(),
                    "summary": answer.summary,
                    "at": _when(record),
                }
                for record in records
                for answer in [record.answer]
            ]
            return self._list.render(answers=answers, limit=self._history.limit)

        return _html(await asyncio.to_thread(page))

    async def _explained(self, request: web.Request) -> web.Response:
        # In a thread: 128 Ki tokens of context take half a second.
        return _html(await asyncio.to_thread(self._explain, await self._record(request)))

    def _explain(self, kept: Record) -> str:
        reference = kept.answer.summary.recipe == explain.REFERENCE
        compare = "" if kept.full is not None or reference else f"{kept.id}/full"
        question, answer, explanation = Conversation.of(kept.request).question, kept.answer, kept.explanation
        if explanation is None:
            reason = answer.summary.degraded_reason
            raise NotFound(f"this answer has no explanation: no worker computed its prompt: {reason}")
        full = kept.full.answer if kept.full is not None else None
        served = {"at": _when(kept), "home": "../", "compare": compare}
        return explain.render(self._page, question, answer, explanation, full, **served)

    async def _compared(self, request: web.Request) -> web.Response:
        """Repeats the question with full attention, at most once, and redirects to the page."""
        _check_same_site(request)
        kept = await self._record(request)
        async with kept.comparing:
            if kept.full is None:
                self._history.compare(kept, await self._full(kept))
        return web.Response(status=303, headers={**_HEADERS, "Location": f"../{kept.id}"})

    async def _full(self, original: Record) -> Record:
        again = pb.GenerateRequest()
        again.CopyFrom(original.request)
        again.recipe, again.explain = explain.REFERENCE, False
        again.ClearField("ratio")
        full = Record(original.tenant, again)
        async with (
            self._servicer.admitted("Generate"),
            contextlib.aclosing(self._servicer.generate(again, None, None)) as responses,
        ):
            async for response in responses:
                full.add(response)
        _ = full.answer  # raises ServiceError if there was no summary
        return full

    async def _record(self, request: web.Request) -> Record:
        """The answer of the caller's tenant that the path names."""
        kept = self._history.get(await self._servicer.tenant_salt(), request.match_info["id"])
        if kept is None:
            raise NotFound("no such answer: newer answers have replaced it, or the gateway was restarted")
        return kept


def _check_same_site(request: web.Request) -> None:
    """Refuses requests that another site makes a browser send (CSRF), which would carry the saved password.

    Browsers send Origin with every POST, newer ones Sec-Fetch-Site too. A request with neither comes from a program,
    which holds its own password.

    Raises:
        PermissionDenied: one of the two headers names another site, or Origin is not a URL.
    """
    sites, origins = (request.headers.getall(name, []) for name in ("Sec-Fetch-Site", "Origin"))
    if not all(site in ("same-origin", "none") for site in sites):
        raise PermissionDenied("another site sent this request")
    # Compare hosts only: a proxy may terminate TLS, which changes the scheme.
    host = request.headers.get("Host", "").lower()
    if not all(host and _host(origin) == host for origin in origins):
        raise PermissionDenied("another site sent this request: its Origin differs from its Host")


def _host(origin: str) -> str:
    try:
        parts = urlsplit(origin.lower())
    except ValueError:
        return ""
    return parts.netloc if parts.scheme in ("http", "https") else ""


def _bearer(authorization: str) -> str:
    """Converts basic authentication to a bearer token, which is the password; returns other schemes unchanged."""
    scheme, _, given = authorization.partition(" ")
    if scheme.lower() != "basic":
        return authorization
    try:
        _, _, password = base64.b64decode(given, validate=True).decode().partition(":")
    except (binascii.Error, UnicodeDecodeError):
        return ""
    return f"Bearer {password}"


def _html(page: str) -> web.Response:
    return web.Response(text=page, content_type="text/html", headers=_HEADERS)


def _when(kept: Record) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(kept.at))
