"""The memory of pages: layout, regions that peers can write, write rights, prefaulting."""
