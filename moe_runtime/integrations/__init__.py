"""This runtime within the programs that clusters are run by."""
