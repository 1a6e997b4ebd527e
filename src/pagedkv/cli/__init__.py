"""The command `pagedkv`."""
