"""A loaded model that answers many requests at a time: what they ask, the engine, the server."""
