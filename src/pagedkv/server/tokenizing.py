"""`/tokenize` and `/detokenize`."""

from __future__ import annotations

from fastapi import FastAPI, Request, Response

from pagedkv.server.chat_schema import template_messages
from pagedkv.server.errors import json_response
from pagedkv.server.prompts import PromptReader
from pagedkv.server.serving import Serving
from pagedkv.server.tokenize_schema import DetokenizeRequest, TokenizeRequest


def add_tokenizing(app: FastAPI, serving: Serving, reader: PromptReader) -> None:
    """The endpoints between text and token ids."""

    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest, request: Request) -> Response:
        serving.check_model(body.model)
        body.check()
        if body.messages is not None:
            ids = await reader.chat(
                template_messages(body.messages),
                request.receive,
                add_generation_prompt=body.add_generation_prompt,
                continue_final_message=body.continue_final_message,
                template_arguments=body.chat_template_kwargs,
                tools=[tool.template_tool for tool in body.tools or ()],
            )
        else:
            [ids] = await reader.texts(
                [body.prompt or ""],
                request.receive,
                param="prompt",
                add_special_tokens=body.add_special_tokens is not False,
            )
        return json_response(
            {
                "count": len(ids),
                "max_model_len": serving.llm.max_model_len,
                "tokens": ids,
                "token_strs": reader.token_strings(ids) if body.return_token_strs else None,
            }
        )

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
        serving.check_model(body.model)
        serving.check_vocabulary(body.tokens, param="tokens")
        text = await reader.decoded(body.tokens, request.receive, param="tokens")
        return json_response({"prompt": text})
