"""Let the reference show docstrings as their authors meant them.

Docstrings here mark a drawing with `::` and write worked examples as doctests; mkdocstrings reads
Markdown, in which the one is a stray colon and the other a quotation.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"^>>> .*(?:\n(?!\s*$).*)*", re.MULTILINE)


class PlainDocstrings(griffe.Extension):
    """Turns `::` into `:` and doctests into code blocks."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            words = re.sub(r"^::\n", "", obj.docstring.value, flags=re.MULTILINE)
            words = re.sub(r"::$", ":", words, flags=re.MULTILINE)
            obj.docstring.value = _EXAMPLE.sub(r"```pycon\n\g<0>\n```", words)
