"""Pages for operators: the last answers of their tenant, each explained, and asked again with full attention."""

import base64
import binascii
import contextlib
import time
from urllib.parse import urlsplit

from aiohttp import web

from fusionkv.gateway import explain
from fusionkv.gateway.auth import access
from fusionkv.gateway.auth.bearer import Bearer
from fusionkv.gateway.config import GatewayConfig
from fusionkv.gateway.conversation import Conversation
from fusionkv.gateway.history import Record
from fusionkv.gateway.http import failures
from fusionkv.gateway.http.listener import Call, Handler, Listener
from fusionkv.gateway.servicer import GatewayServicer
from fusionkv.protos.gateway.v1 import gateway_pb2 as pb
from fusionkv.protos.runtime.errors import NotFound, PermissionDenied, ServiceError

# A page runs nothing, loads nothing, is framed by nobody, and is kept nowhere: it shows a tenant's documents.
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; form-action 'self'; "
    "frame-ancestors 'none'; base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
    # With "no-referrer" a browser would say of the page's own form that it comes from "null".
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-store",
}
# Browsers ask for a name and a password themselves.
_ASK = 'Basic realm="FusionKV, for operators: any name, and the token as the password", charset="UTF-8"'


class AdminServer(Listener):
    """Serves the gateway's history. Where calls need a token, so do pages: an operator's, as the password."""

    name = "fusionkv-gateway-admin"

    def __init__(self, config: GatewayConfig, servicer: GatewayServicer, bearer: Bearer | None) -> None:
        super().__init__(config.admin_listen, config)
        assert servicer.history is not None
        self._servicer = servicer
        self._history = servicer.history
        self._bearer = bearer
        self._list, self._page = explain.template("answers.html"), explain.template()
        self.get("/", self._guarded(self._answers))
        self.get("/explain/{id}", self._guarded(self._explained))
        self.post("/explain/{id}/full", self._guarded(self._compared))

    def failed(self, error: Exception) -> web.Response:
        """A line of text."""
        if isinstance(error, web.HTTPException):
            return web.Response(text=f"{error.reason}\n", status=error.status, headers=_HEADERS)
        failures.record(error)
        headers = {**_HEADERS, **failures.headers(error)}
        if "WWW-Authenticate" in headers:
            headers["WWW-Authenticate"] = _ASK
        return web.Response(text=f"{failures.message(error)}\n", status=failures.status(error), headers=headers)

    async def _answers(self, request: web.Request) -> web.Response:
        kept = self._history.of(await self._servicer.tenant_salt())
        answers = [
            {
                "id": one.id,
                "question": Conversation.of(one.request).question,
                "corpus": one.request.corpus or "own passages",
                "text": one.answer.text.strip(),
                "summary": one.answer.summary,
                "at": _when(one),
            }
            for one in kept
        ]
        return _html(self._list.render(answers=answers, limit=self._history.limit))

    async def _explained(self, request: web.Request) -> web.Response:
        kept = await self._asked(request)
        reference = kept.answer.summary.recipe == explain.REFERENCE
        compare = "" if kept.full is not None or reference else f"{kept.id}/full"
        served = explain.Served(at=_when(kept), home="../", compare=compare)
        question, answer, explanation = Conversation.of(kept.request).question, kept.answer, kept.explanation
        full = kept.full.answer if kept.full is not None else None
        return _html(explain.render(self._page, question, answer, explanation, full, served))

    async def _compared(self, request: web.Request) -> web.Response:
        """Asks again, once, with full attention; then shows the page."""
        _of_this_site(request)
        kept = await self._asked(request)
        if kept.full is None:
            self._history.compare(kept, await self._full(kept))
        return web.Response(status=303, headers={**_HEADERS, "Location": f"../{kept.id}"})

    async def _full(self, asked: Record) -> Record:
        again = pb.GenerateRequest()
        again.CopyFrom(asked.request)
        again.recipe, again.explain = explain.REFERENCE, False
        again.ClearField("ratio")
        full, ended = Record(asked.tenant, again), False
        async with contextlib.aclosing(self._servicer.generate(again, Call(), None)) as responses:
            async for response in responses:
                full.add(response)
                ended = response.HasField("summary")
        if not ended:
            raise ServiceError("the answer ended without its summary")
        return full

    async def _asked(self, request: web.Request) -> Record:
        """The answer that the path names, of the caller's tenant."""
        kept = self._history.get(await self._servicer.tenant_salt(), request.match_info["id"])
        if kept is None:
            raise NotFound("no such answer: newer ones have taken its place, or the gateway was started again")
        return kept

    def _guarded(self, handler: Handler) -> Handler:
        """Lets operators in."""

        async def guarded(request: web.Request) -> web.StreamResponse:
            if self._bearer is not None:
                given = [_bearer(value) for value in request.headers.getall("Authorization", [])]
                access.enter(await self._bearer.admit(given, access.ADMIN_PAGES))
            return await handler(request)

        return guarded


def _of_this_site(request: web.Request) -> None:
    """Refuses what another site has a browser send, which sends the password along.

    Every browser says where a POST comes from: by Origin, newer ones by Sec-Fetch-Site too. What says neither is a
    program, whose password nobody else can use.

    Raises:
        PermissionDenied: one of the two names another site, or Origin none.
    """
    sites, origins = (request.headers.getall(name, []) for name in ("Sec-Fetch-Site", "Origin"))
    if not all(site in ("same-origin", "none") for site in sites):
        raise PermissionDenied("another site sent this request")
    # Not the scheme: a proxy may have ended TLS.
    host = request.headers.get("Host", "").lower()
    if not all(host and _host(origin) == host for origin in origins):
        raise PermissionDenied("another site sent this request: its Origin is not the Host that it is for")


def _host(origin: str) -> str:
    try:
        parts = urlsplit(origin.lower())
    except ValueError:
        return ""
    return parts.netloc if parts.scheme in ("http", "https") else ""


def _bearer(authorization: str) -> str:
    """A password as the bearer token that it is; anything else as it is."""
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
