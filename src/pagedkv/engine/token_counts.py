"""Which tokens a sequence has so far, and how often: what penalties look at.

Kept as the sequence grows, so that a step costs the distinct tokens and never the whole text.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray


class TokenCounts:
    """The distinct tokens of one sequence, in the order in which they first came.

    >>> counts = TokenCounts([5, 7, 5])
    >>> counts.append(7)
    >>> counts.append(9)
    >>> counts.token_ids.tolist(), counts.output_counts.tolist(), counts.newest
    ([5, 7, 9], [0, 1, 1], 9)

    `append` and `fork` cost O(1) and O(distinct tokens).
    """

    def __init__(self, prompt_ids: Iterable[int] = ()) -> None:
        distinct = list(dict.fromkeys(prompt_ids))
        self._place = {token_id: place for place, token_id in enumerate(distinct)}
        self._ids = np.array(distinct, dtype=np.int64)
        self._counts = np.zeros(len(distinct), dtype=np.int64)
        self.newest: int | None = None
        """The last token of the output; None while there is none."""

    @property
    def token_ids(self) -> NDArray[np.int64]:
        """[d]: the distinct tokens of prompt and output."""
        return self._ids[: len(self._place)]

    @property
    def output_counts(self) -> NDArray[np.int64]:
        """[d]: how often each is in the output; 0 for tokens that only the prompt has."""
        return self._counts[: len(self._place)]

    def append(self, token_id: int) -> None:
        """Count a token of the output."""
        place = self._place.setdefault(token_id, len(self._place))
        if place == len(self._ids):
            room = max(64, 2 * place)
            self._ids = np.resize(self._ids, room) if place else np.zeros(room, dtype=np.int64)
            counts = np.zeros(room, dtype=np.int64)
            counts[:place] = self._counts
            self._counts = counts
        self.newest = token_id
        self._ids[place] = token_id
        self._counts[place] += 1
