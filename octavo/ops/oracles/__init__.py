"""What each op computes, written slowly: in float64, row by row, sharing no code with what runs.

Owns nothing the engine runs. ``ops/table.py`` names the oracle of every op.
"""
