"""The fields that say which functions a model may call, and the calls in a chat's messages."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from pagedkv.engine.structured_output import StructuredOutput, check_nesting
from pagedkv.errors import InvalidInput
from pagedkv.server.body_schema import Body, ListOf, Typed
from pagedkv.server.errors import ApiError
from pagedkv.server.limits import MAX_TOOLS
from pagedkv.server.tool_calls import CallReader, ForcedCalls, FreeCalls, call_grammar

_Name = Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,64}$")]


class _OfFunctions(Typed):
    """What has a type, which is that of functions."""

    of_another = "type {kind} is not supported: function is"

    type: Literal["function"]


class Function(Body):
    """A function: its name, what it is for, and the JSON schema of its arguments."""

    name: _Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(_OfFunctions):
    """A function that the model may call."""

    function: Function

    def argument_schema(self) -> str:
        """The schema of its arguments, which are an object; without one there are none.

        Raises `InvalidInput`.
        """
        parameters = self.function.parameters
        if parameters is None:
            parameters = {"properties": {}, "additionalProperties": False}
        whole = {"type": "object", **parameters}
        if whole["type"] != "object":
            raise InvalidInput("arguments are an object: give type object")
        return StructuredOutput(json=whole).text

    @property
    def template_tool(self) -> dict[str, Any]:
        """As chat templates take it."""
        parts = ("name", "description", "parameters")
        given = {part: getattr(self.function, part) for part in parts}
        kept = {part: value for part, value in given.items() if value is not None}
        # Some templates look into what need not be there.
        function = {"description": "", "parameters": {"type": "object", "properties": {}}, **kept}
        return {"type": "function", "function": {part: function[part] for part in parts}}


class ChosenFunction(Body):
    """The name of a function."""

    name: str


class ToolChoice(_OfFunctions):
    """The function that must be called."""

    function: ChosenFunction


class CalledFunction(Body):
    """The function of a call, and its arguments as JSON."""

    name: _Name
    arguments: str
    parsed_arguments: Any = None  # of OpenAI's client, which made it of the arguments


class ToolCall(_OfFunctions):
    """A call in a message of the assistant's."""

    id: str
    function: CalledFunction
    index: int | None = None

    def template_call(self) -> dict[str, Any]:
        """As chat templates take it, its arguments parsed. Raises `InvalidInput`."""
        try:
            arguments = json.loads(self.function.arguments or "{}")
            check_nesting(arguments)
        except RecursionError:
            raise InvalidInput("arguments are nested too deeply") from None
        except InvalidInput:
            raise
        except ValueError:
            arguments = None
        if not isinstance(arguments, dict):
            raise InvalidInput("arguments are no object in JSON")
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": "function", "function": function}


class ToolFields(Body):
    """Which functions the model may call, and which it must."""

    tools: Annotated[ListOf[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | Literal["none", "auto", "required"] | None = None
    parallel_tool_calls: bool | None = None

    @property
    def offered(self) -> list[Tool]:
        """The functions that the model is told of: none where it may call none."""
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def is_call_forced(self) -> bool:
        """Whether the answer must be a call."""
        return self.tool_choice not in (None, "none", "auto")

    def check_tools(self) -> None:
        """Raise `ApiError` for functions that cannot be, and choices that are not among them."""
        check_tools(self.tools or ())
        if not self.is_call_forced:
            return
        if not self.tools:
            raise ApiError(400, "tool_choice asks for a call: give tools", param="tool_choice")
        if isinstance(self.tool_choice, ToolChoice) and not self._callable:
            name = self.tool_choice.function.name[:64]
            raise ApiError(400, f"tool_choice: no tool is called {name!r}", param="tool_choice")

    def structured_calls(self, *, otherwise: StructuredOutput | None) -> StructuredOutput:
        """What an answer is that must be calls, or else JSON. Raises `InvalidInput`."""
        schemas = {tool.function.name: tool.argument_schema() for tool in self._callable}
        is_one = self.parallel_tool_calls is False or isinstance(self.tool_choice, ToolChoice)
        answer = None if otherwise is None else otherwise.text
        grammar = call_grammar(schemas, answer, is_one=is_one)
        return StructuredOutput(grammar=grammar, is_plain=True)

    def call_reader(self) -> CallReader | None:
        """What finds the calls in an answer; None where there are none to be found."""
        if not self.offered:
            return None
        if self.is_call_forced:
            return ForcedCalls()
        names = {tool.function.name for tool in self.offered}
        return FreeCalls(names, max_calls=1 if self.parallel_tool_calls is False else None)

    @property
    def _callable(self) -> list[Tool]:
        if isinstance(self.tool_choice, ToolChoice):
            wanted = self.tool_choice.function.name
            return [tool for tool in self.offered if tool.function.name == wanted]
        return self.offered


def check_tools(tools: Sequence[Tool]) -> None:
    """Raise `ApiError` for functions of one name, and for schemas that cannot be."""
    seen: dict[str, int] = {}
    for place, tool in enumerate(tools):
        first = seen.setdefault(tool.function.name, place)
        if first != place:
            param = f"tools.{place}.function.name"
            message = f"{param}: {tool.function.name!r} is the name of tools.{first} already"
            raise ApiError(400, message, param=param)
        try:
            tool.argument_schema()
        except InvalidInput as problem:
            param = f"tools.{place}.function.parameters"
            raise ApiError(400, f"{param}: {problem}", param=param) from None
