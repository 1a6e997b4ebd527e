"""`python -m pagedkv` is the command `pagedkv`."""

from __future__ import annotations

from pagedkv.cli.main import main

if __name__ == "__main__":
    main()
