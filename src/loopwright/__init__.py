"""Loopwright serves and post-trains diffusion, video and omni models with one engine.

    import loopwright
    model = loopwright.load("loopwright/tiny-wan")
    model.generate("a fox moving left on a blue background").save("fox.mp4")

Importing this package imports no torch; `load` does.
"""
