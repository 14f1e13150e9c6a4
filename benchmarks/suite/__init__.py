"""What all cases of ``moe-runtime bench`` share.

A case (``cases``) gives the numbers of one repetition; ``runner`` asks all systems in turn until
the numbers are certain; ``results`` is the file format, and ``comparing`` compares two files.
"""
