"""A load generator: many clients of a server of OpenAI's API, and what they wait for."""
