"""Page stores: they own the memory of pages and execute step descriptions."""
