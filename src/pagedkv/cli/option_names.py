"""Errors of the library in the words of the command line.

What checks a value knows it as a parameter: `max_num_seqs is 0`. Who typed it knows an option:
`--max-num-seqs is 0`. Here, in one place, one becomes the other.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any


def in_option_names(message: str, parameters: Iterable[Any]) -> str:
    """The message with the names that a command's parameters have on its command line.

    A name with an underscore is meant wherever it stands as a word, and not within a path or in
    quotes. One without may be any word, so it is meant only where the message begins with it and
    says what it is: `temperature is -1`.
    """
    options: dict[str, str] = {}
    for parameter in parameters:
        if parameter.param_type_name == "option":
            options[parameter.name] = parameter.opts[0]
            # An option that is called otherwise here: `-n` of `samples`.
            options |= {flag.lstrip("-").replace("-", "_"): flag for flag in parameter.opts}
    long = "|".join(re.escape(name) for name in options if "_" in name)
    short = "|".join(re.escape(name) for name in options if "_" not in name)
    meant = rf"^({short})(?= is | has )"
    if long:
        meant += rf"|(?<![\w.'\"/\\=-])({long})(?!\.?[\w'\"/\\=-])"
    return re.sub(meant, lambda found: options[found[0]], message)
