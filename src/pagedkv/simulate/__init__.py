"""Traffic replayed on the blocks, and on the contiguous schemes that paging replaces."""
