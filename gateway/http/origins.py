"""CORS: only web pages of the origins in `http_allowed_origins` may call the HTTP endpoint from a browser."""

from collections.abc import Awaitable, Callable, Sequence

from aiohttp import web

ANY = "*"
# The wildcard does not include Authorization; OpenAI's client adds more than ten headers of its own.
_HEADERS = "Authorization, Content-Type, *"
_EXPOSED = "Retry-After, Retry-After-Ms, WWW-Authenticate"
_MAX_AGE_SECONDS = 3600


class Origins:
    """The origins that may call. Requests carry no cookies, so that no credentials are allowed by CORS."""

    def __init__(self, allowed: Sequence[str]) -> None:
        self._allowed = frozenset(allowed)

    def allows(self, origin: str) -> bool:
        return origin in self._allowed or ANY in self._allowed

    def attach(self, app: web.Application) -> None:
        """Makes an application answer preflights, and name the caller's origin in all responses. Call it once."""
        if self._allowed:
            app.on_response_prepare.append(self._name)
            app.middlewares.append(self._preflight)

    async def _name(self, request: web.Request, response: web.StreamResponse) -> None:
        response.headers["Vary"] = "Origin"
        origin = request.headers.get("Origin")
        if origin is not None and self.allows(origin):
            response.headers["Access-Control-Allow-Origin"] = ANY if ANY in self._allowed else origin
            response.headers["Access-Control-Expose-Headers"] = _EXPOSED

    @web.middleware
    async def _preflight(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Answers a browser's question whether a page may call; it carries no token."""
        if request.method != "OPTIONS" or "Access-Control-Request-Method" not in request.headers:
            return await handler(request)
        refused = request.match_info.http_exception
        if not isinstance(refused, web.HTTPMethodNotAllowed) or not self.allows(request.headers.get("Origin", "")):
            return await handler(request)
        headers = {
            "Access-Control-Allow-Methods": ", ".join(sorted(refused.allowed_methods)),
            "Access-Control-Allow-Headers": _HEADERS,
            "Access-Control-Max-Age": str(_MAX_AGE_SECONDS),
        }
        return web.Response(status=204, headers=headers)
