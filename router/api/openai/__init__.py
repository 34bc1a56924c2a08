"""The OpenAI API: reading requests, writing answers."""
