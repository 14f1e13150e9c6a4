"""Plans made from measurements: placements, schedules, predicted times.

Nothing here executes experts or moves bytes. SciPy is imported when a solver is called.
"""
