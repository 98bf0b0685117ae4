"""Training data: what a data set declares, the pixels of a row, and the order in which rows are seen.

rows = dataset.read("clips/rows.jsonl")                             # every row is good, or DataError says which not
geometry = buckets.choose(rows[0], (Geometry(480, 832, 81),))       # the shape this row is trained at
decode.pixels(rows[0], geometry)                                    # float32 [3, 81, 480, 832] in [-1, 1]
"""
