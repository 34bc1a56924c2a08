"""Load on any OpenAI-style server: what `microserve bench` does."""
