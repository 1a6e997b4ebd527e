"""The packages that a command needs and that only an extra of pagedkv brings."""

from __future__ import annotations

import importlib.util

from pagedkv.errors import InvalidInput

_ENGINE = ("torch", "transformers", "safetensors")
_STRUCTURED = ("llguidance",)
_SERVER = ("fastapi", "uvicorn", "prometheus_client")


def require_engine() -> None:
    """Raise `InvalidInput`, one line, where packages that run models are not installed."""
    _require("running models", _ENGINE, "engine")


def require_structured() -> None:
    """Raise `InvalidInput`, one line, where what follows schemas and grammars is not installed."""
    _require("structured output", _STRUCTURED, "structured")


def require_server() -> None:
    """Raise `InvalidInput`, one line, where packages that serve are not installed."""
    _require("serving", _SERVER, "server")


def _require(what: str, packages: tuple[str, ...], extra: str) -> None:
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise InvalidInput(f"{what} needs {' and '.join(missing)}: install pagedkv[{extra}]")
