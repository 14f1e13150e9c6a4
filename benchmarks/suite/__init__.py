"""What all cases of ``moe-runtime bench`` share.

Every system under test is a peer in a process of its own (``peers``), this project's too. A case
(``cases``) gives numbers of one repetition; ``runner`` asks all systems in turn until the numbers
are certain enough; ``results`` is the one file format of all cases, and ``judging`` compares two
such files.
"""
