"""The fields that say what form an answer has: OpenAI's, and those of vLLM, new and old."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from pagedkv.engine.structured_output import MAX_STRUCTURE_CHARACTERS, StructuredOutput
from pagedkv.errors import InvalidInput
from pagedkv.server.body_schema import Body, ListOf, Typed, WholeBody
from pagedkv.server.errors import ApiError

Schema = dict[str, Any] | bool | str
"""A JSON schema, parsed or as text."""

_Text = Annotated[str, Field(max_length=MAX_STRUCTURE_CHARACTERS)]
_Choices = Annotated[ListOf[_Text], Field(min_length=1)]


class JSONSchemaFormat(Body):
    """A JSON schema that an answer has, with its name, which changes nothing."""

    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | bool, Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(Typed):
    """Which form the answer has, in OpenAI's words. A schema is followed, `strict` or not."""

    of_another = "{kind} is not supported: text, json_object and json_schema are"

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JSONSchemaFormat | None = None


class StructuredOutputs(Body):
    """Which form the answer has, in vLLM's words: one of the first five."""

    json_: Annotated[Schema | None, Field(alias="json")] = None
    regex: _Text | None = None
    choice: _Choices | None = None
    grammar: _Text | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False


class StructuredFields(WholeBody):
    """What form the answer has; at most one of these fields may say it."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: _Text | None = None
    guided_choice: _Choices | None = None
    guided_grammar: _Text | None = None

    @property
    def structured_field(self) -> str | None:
        """The name of the field that says what form the answer has; None where none does.

        Raises `ApiError` where several do.
        """
        given = [name for name in StructuredFields.model_fields if getattr(self, name) is not None]
        if self.response_format is not None and self.response_format.type == "text":
            given.remove("response_format")
        if len(given) > 1:
            raise ApiError(
                400,
                f"{given[0]} and {given[1]} both say what form the answer has: give one",
                param=given[1],
            )
        return given[0] if given else None

    @property
    def structured(self) -> StructuredOutput | None:
        """What the text must be; None where any will do. Raises `ApiError`."""
        field = self.structured_field
        if field is None:
            return None
        try:
            return StructuredOutput(**self._said_by(field))
        except InvalidInput as problem:
            raise ApiError(400, f"{field}: {problem}", param=field) from None

    def _said_by(self, field: str) -> dict[str, Any]:
        if field == "response_format" and self.response_format is not None:
            if self.response_format.type == "json_object":
                return {"json_object": True}
            if self.response_format.json_schema is None:
                raise ApiError(
                    400,
                    "response_format json_schema is without one: give json_schema with a schema",
                    param="response_format.json_schema",
                )
            return {"json": self.response_format.json_schema.schema_}
        if self.structured_outputs is not None:
            dumped: dict[str, Any] = self.structured_outputs.model_dump(by_alias=True)
            return dumped
        return {field.removeprefix("guided_"): getattr(self, field)}
