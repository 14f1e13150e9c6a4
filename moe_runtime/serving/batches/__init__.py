"""Files of prompts, answered as many at a time as there is room for."""
