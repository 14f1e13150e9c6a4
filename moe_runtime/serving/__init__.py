"""Answers many requests at a time with a loaded model: requests, the engine, the HTTP server."""
