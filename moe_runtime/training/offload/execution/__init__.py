"""Forward and backward passes over experts that are read as they are needed."""
