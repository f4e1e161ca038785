"""The HTTP server: OpenAI's, Ollama's and Anthropic's APIs over one engine, and what it takes to operate it."""
