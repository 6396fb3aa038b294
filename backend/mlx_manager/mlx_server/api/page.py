"""`/` and `/ui`: the page for browsers, which talks to models and shows what the server does.

The page is built from `frontend/` into the package's `web/`. Its files hold nothing of the owner's,
so that they need no key; all that the page shows comes by the API, with the key that is typed in.
"""

from __future__ import annotations

import gzip
import hashlib
import mimetypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import RedirectResponse
from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.routing import Match
from starlette.types import Scope

import mlx_manager

WEB = Path(mlx_manager.__file__).parent / "web"
PATH = "/ui"
INDEX = "index.html"
METHODS = ["GET", "HEAD"]
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        # Pictures that were pasted; those of other sites would tell them what a model wrote.
        "img-src 'self' data: blob:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types svelte-trusted-html dompurify",
    )
)
"""Content-Security-Policy: scripts are our own files, and no text becomes one."""
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
FOR_EVER = "public, max-age=31536000, immutable"
"""Caching of files that have a hash of their content in their names."""


@dataclass(frozen=True, slots=True)
class PageFile:
    """A file of the page. packed: its content as gzip."""

    content: bytes
    packed: bytes
    kind: str
    tag: str


@cache
def page_files() -> dict[str, PageFile]:
    """Return the files of the page by their paths within `web/`. Reads them the first time."""
    found = (path for path in sorted(WEB.rglob("*")) if path.is_file())
    return {path.relative_to(WEB).as_posix(): _read(path) for path in found}


def _read(path: Path) -> PageFile:
    content = path.read_bytes()
    kind = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
    if path.suffix == ".js":
        # A system's own table may say text/plain, which browsers do not run.
        kind = "text/javascript"
    tag = hashlib.sha256(content).hexdigest()[:32]
    return PageFile(content, gzip.compress(content, 9, mtime=0), kind, f'"{tag}"')


def is_page(scope: Scope, path: str) -> bool:
    """Return whether a request is for a file of the page. path: where it is routed."""
    if scope["method"] not in METHODS:
        return False
    return path == PATH or path.startswith(f"{PATH}/") or (path == "/" and wants_html(scope))


def wants_html(scope: Scope) -> bool:
    """Return whether a browser asks: at `/`, Ollama's clients look for a sentence instead."""
    return "text/html" in Headers(scope=scope).get("accept", "")


class BrowserRoute(APIRoute):
    """Route for browsers alone; to others it does not exist."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        if scope["type"] == "http" and wants_html(scope):
            return super().matches(scope)
        return Match.NONE, {}


front = APIRouter(route_class=BrowserRoute)
router = APIRouter()


def install(app: FastAPI) -> None:
    """Serve the page. To be called before the routers, as Ollama's API has `/`, too."""
    app.include_router(front)
    app.include_router(router)


@front.api_route("/", methods=METHODS, include_in_schema=False)
@router.api_route(PATH, methods=METHODS, include_in_schema=False)
async def index(request: Request) -> Response:
    """Send the page itself, which is asked for anew each time and seldom sent again."""
    return sent(request, page_files()[INDEX], "no-cache")


@router.api_route(f"{PATH}/{{name:path}}", methods=METHODS, include_in_schema=False)
async def file(request: Request, name: str) -> Response:
    """Send a file of the page."""
    if name in ("", INDEX):
        # The page's own links begin in the folder that `/ui` is in.
        return RedirectResponse(f"../{PATH[1:]}")
    if name not in page_files():
        raise HTTPException(404)
    return sent(request, page_files()[name], FOR_EVER)


def sent(request: Request, page: PageFile, caching: str) -> Response:
    headers = {**HEADERS, "etag": page.tag, "cache-control": caching, "vary": "accept-encoding"}
    if page.tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    content = page.content
    if "gzip" in request.headers.get("accept-encoding", ""):
        content, headers["content-encoding"] = page.packed, "gzip"
    return Response(content, headers=headers, media_type=page.kind)
