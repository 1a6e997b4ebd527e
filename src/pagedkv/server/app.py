"""The server's application: endpoints, and what errors look like."""

from __future__ import annotations

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from pagedkv._version import __version__
from pagedkv.engine.detokenizer import TokenTexts
from pagedkv.server.body_errors import from_unread, from_validation
from pagedkv.server.chat_schema import ChatRequest, Message, TextPart
from pagedkv.server.completion_schema import CompletionRequest
from pagedkv.server.errors import ApiError, answer_api_error
from pagedkv.server.exchange import ClientLeft
from pagedkv.server.generation import add_generation
from pagedkv.server.logprob_shapes import TokenNames
from pagedkv.server.looks import add_looks
from pagedkv.server.memory_page.endpoints import add_memory_page
from pagedkv.server.openapi import describe_errors
from pagedkv.server.prompts import PromptReader
from pagedkv.server.sampling_schema import StreamOptions
from pagedkv.server.serving import Serving
from pagedkv.server.structured_schema import JSONSchemaFormat, ResponseFormat, StructuredOutputs
from pagedkv.server.tokenize_schema import DetokenizeRequest, TokenizeRequest
from pagedkv.server.tokenizing import add_tokenizing
from pagedkv.server.tool_schema import (
    CalledFunction,
    ChosenFunction,
    Function,
    Tool,
    ToolCall,
    ToolChoice,
)


def create_app(serving: Serving) -> FastAPI:
    """The application of a server that answers with `serving`; `app.state.serving` is it.

    `app.state.reader` makes token ids of its prompts, and is to be closed; `app.state.watch` is
    that of the memory page, and is to keep its history.
    """
    app = FastAPI(title="pagedkv", version=__version__, docs_url=None, redoc_url=None)
    app.state.serving = serving
    app.add_exception_handler(ApiError, _answer_api_error)
    app.add_exception_handler(ClientLeft, _answer_nobody)
    app.add_exception_handler(RequestValidationError, _answer_validation_error)
    app.add_exception_handler(HTTPException, _answer_http_exception)
    app.add_exception_handler(Exception, _answer_failure)
    llm = serving.llm
    reader = PromptReader(
        llm.tokenizer,
        max_tokens=serving.limits.max_prompt_tokens or llm.max_model_len,
        queue=serving.reading,
    )
    app.state.reader = reader
    names = None if llm.tokenizer is None else TokenNames(TokenTexts(llm.tokenizer))
    add_generation(app, serving, reader, names)
    add_tokenizing(app, serving, reader)
    add_looks(app, serving)
    app.state.watch = add_memory_page(app, serving)
    describe_errors(app)
    return app


_FIELDS = frozenset(
    field.alias or name
    for model in (
        *(ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest),
        *(Message, TextPart, StreamOptions),
        *(ResponseFormat, JSONSchemaFormat, StructuredOutputs),
        *(Tool, Function, ToolChoice, ChosenFunction, ToolCall, CalledFunction),
    )
    for name, field in model.model_fields.items()
)


async def _answer_api_error(request: Request, error: Exception) -> Response:
    """Any refusal, which is counted."""
    assert isinstance(error, ApiError)
    request.app.state.serving.count_refusal(error)
    return await answer_api_error(request, error)


async def _answer_validation_error(request: Request, error: Exception) -> Response:
    """A body that the schema refuses, by its first mistake."""
    assert isinstance(error, RequestValidationError)
    return await _answer_api_error(request, from_validation(error.errors(), _FIELDS, error.body))


async def _answer_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 400 and error.__cause__ is not None:
        return await _answer_api_error(request, from_unread(error.__cause__))
    message = f"{request.method} {request.url.path[:200]}: {error.detail}"
    made = await _answer_api_error(request, ApiError(error.status_code, message))
    made.headers.update(error.headers or {})
    return made


async def _answer_nobody(request: Request, error: Exception) -> Response:
    return Response(status_code=499)


async def _answer_failure(request: Request, error: Exception) -> Response:
    return ApiError(500, "the server failed").response()
