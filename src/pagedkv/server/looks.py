"""The endpoints that look at the server: models, health, metrics, laws."""

from __future__ import annotations

from fastapi import FastAPI, Response

from pagedkv._version import __version__
from pagedkv.errors import BrokenLaw
from pagedkv.server.errors import json_response
from pagedkv.server.metrics import CONTENT_TYPE
from pagedkv.server.serving import Serving


def add_looks(app: FastAPI, serving: Serving) -> None:
    """The endpoints that look at the server."""

    @app.head("/v1/models", include_in_schema=False)
    @app.get("/v1/models")
    async def models() -> Response:
        return json_response({"object": "list", "data": [serving.description]})

    @app.get("/v1/models/{model:path}")
    async def model(model: str) -> Response:
        serving.check_model(model)
        return json_response(serving.description)

    @app.head("/health", include_in_schema=False)
    @app.get("/health")
    async def health() -> Response:
        serving.check_open()
        return json_response({"status": "ok"})

    @app.head("/version", include_in_schema=False)
    @app.get("/version")
    async def version() -> Response:
        return json_response({"version": __version__})

    @app.get("/debug/verify")
    async def verify() -> Response:
        try:
            await serving.verify()
        except BrokenLaw as broken:
            return json_response({"verified": False, "laws": broken.laws}, status=500)
        return json_response({"verified": True, "laws": []})

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(await serving.metrics_page(), media_type=CONTENT_TYPE)
