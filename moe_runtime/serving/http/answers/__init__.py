"""What answers consist of: text out of tokens, sections, calls of tools, and their JSON."""
