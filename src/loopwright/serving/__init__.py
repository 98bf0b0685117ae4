"""HTTP in OpenAI's shapes over one engine: images at once, videos as jobs that outlive client and server.

    service = Service([api.load("loopwright/tiny-wan")], Settings(folder=Path("serving")))
    app = create_app(service)                  # an ASGI application; `server.serve` runs it

A request is resolved by `Model.request` before it is queued, so whatever is wrong with it is told at once. `Driver`'s
thread alone runs steps; the event loop hears of them; frames become files in a pool of threads. Deliberately absent:
fetching what a client names.
"""
