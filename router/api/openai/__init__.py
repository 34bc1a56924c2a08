"""The OpenAI API: parses requests, runs them, formats responses."""
