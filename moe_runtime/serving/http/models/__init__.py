"""The models of a server: what it knows of each, their names, and one budget for several."""
