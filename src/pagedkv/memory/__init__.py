"""Which physical block belongs to whom."""
