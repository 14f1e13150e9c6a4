"""Systems under test, one file each, and the program that runs such a file (``host.py``).

Nothing here is imported by the rest: the files run in processes and environments of their own.
"""
